"""Error of backends against exact softmax attention, or of features at kernel entries, size by size."""

from efficient_attn.measure.quantities import QUANTITIES
from efficient_attn.studies.mse.plan import plan
from efficient_attn.studies.study import Study

STUDY = Study(
    name="mse",
    plan=plan,
    module=__name__,
    kinds=("error",),
    quantities=tuple(
        QUANTITIES[name]
        for name in (
            "output_relative_error",
            "output_mse",
            "density",
            "covered_mass",
            "kernel_mse",
            "expected_kernel_mse",
            "kernel_value",
            "flops",
        )
    ),
    budget="5m",
)
