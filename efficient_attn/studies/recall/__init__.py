"""Associative recall: the accuracy of one trained block per backend."""

from efficient_attn.measure.quantities import QUANTITIES
from efficient_attn.studies.recall.plan import plan
from efficient_attn.studies.study import Study

STUDY = Study(
    name="recall",
    plan=plan,
    module=__name__,
    kinds=("recall",),
    quantities=(*(QUANTITIES[name] for name in ("accuracy", "chance", "answers", "floats_read")),),
    budget="5m",
)
