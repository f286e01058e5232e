"""Error of random features at one entry of the softmax kernel, compared with theory."""

from efficient_attn.runner.quantity import QUANTITIES
from efficient_attn.studies.kernel.plan import plan
from efficient_attn.studies.study import Study

STUDY = Study(
    name="kernel",
    plan=plan,
    folder=__name__,
    kinds=("error",),
    quantities=tuple(
        QUANTITIES[name] for name in ("kernel_mse", "expected_kernel_mse", "kernel_value", "num_directions")
    ),
)
