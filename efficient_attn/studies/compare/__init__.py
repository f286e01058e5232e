"""Error, time and peak memory of backends on the same q, k, v at one length."""

from efficient_attn.measure.quantities import QUANTITIES
from efficient_attn.studies.compare.plan import plan
from efficient_attn.studies.study import Study

STUDY = Study(
    name="compare",
    plan=plan,
    folder=__name__,
    kinds=("error", "time", "memory"),
    quantities=tuple(QUANTITIES[name] for name in ("output_relative_error", "time_s", "peak_bytes")),
)
