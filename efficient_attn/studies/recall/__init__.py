"""Associative recall: the accuracy of one trained block per backend."""

from efficient_attn.analysis.quantities import BY_NAME
from efficient_attn.studies.recall.plan import plan
from efficient_attn.studies.study import Study

STUDY = Study(
    name="recall",
    plan=plan,
    folder=__name__,
    kinds=("recall",),
    quantities=tuple(BY_NAME[name] for name in ("accuracy", "chance", "answers", "numbers_read")),
)
