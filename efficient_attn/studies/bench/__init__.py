"""Time and peak memory of backends at several lengths."""

from efficient_attn.measure.quantities import QUANTITIES
from efficient_attn.studies.bench.plan import plan
from efficient_attn.studies.study import Study

STUDY = Study(
    name="bench",
    plan=plan,
    folder=__name__,
    kinds=("time", "memory"),
    quantities=tuple(
        QUANTITIES[name]
        for name in ("time_s", "device_time_s", "peak_bytes", "parameter_bytes", "state_bytes")
    ),
    budget="90s",
)
