"""Associative recall: the accuracy of one trained block per backend."""

from efficient_attn.runner.quantity import MATTERS, QUANTITIES, Quantity, setting
from efficient_attn.studies.recall.plan import plan
from efficient_attn.studies.study import Study

STUDY = Study(
    name="recall",
    plan=plan,
    folder=__name__,
    kinds=("recall",),
    quantities=(
        Quantity(
            name="accuracy",
            unit="share",
            meaning="Share of right answers after training.",
            better="more",
            scatter="seeds",
            threshold=MATTERS,
        ),
        setting("chance", "share", "Expected accuracy of a guess.", type="number"),
        setting("answers", "", "Number of answers behind the accuracy."),
        QUANTITIES["floats_read"],
    ),
)
