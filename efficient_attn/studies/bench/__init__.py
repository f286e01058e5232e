"""Error, time and peak memory of backends at several lengths."""

from efficient_attn.measure.quantities import QUANTITIES
from efficient_attn.studies.bench.plan import plan
from efficient_attn.studies.study import Study

STUDY = Study(
    name="bench",
    plan=plan,
    module=__name__,
    kinds=("time", "memory", "error"),
    quantities=tuple(
        QUANTITIES[name]
        for name in (
            "time_s",
            "device_time_s",
            "peak_bytes",
            "parameter_bytes",
            "state_bytes",
            "output_relative_error",
            "output_mse",
            "density",
            "covered_mass",
        )
    ),
    budget="90s",
)
