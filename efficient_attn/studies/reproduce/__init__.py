"""Figures and tables of papers measured again: the claims, our numbers, a verdict on each."""

from efficient_attn.runner.quantity import QUANTITIES
from efficient_attn.studies.reproduce.plan import plan
from efficient_attn.studies.study import Study

STUDY = Study(
    name="reproduce",
    plan=plan,
    folder=__name__,
    kinds=("count",),
    quantities=tuple(
        QUANTITIES[name]
        for name in (
            "sequential_operations",
            "path_length",
            "singular_values",
            "score_variance",
            "softmax_gradient",
            "accuracy",
            "kernel_mse",
            "output_mse",
        )
    ),
    budget="100s",
)
