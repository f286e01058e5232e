"""What the machine did while it measured: work of others, time taken away, a clock that slowed down.

Nothing here is exact, and not every system tells all of it: what is not told is None.
"""

import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from efficient_attn.measure.environment import ask

# The fixed loop: long enough for the clock, short enough to be left alone by the scheduler once in so many.
_LOOP_STEPS, _LOOPS = 20_000, 100

_THROTTLES = "/sys/devices/system/cpu/cpu*/thermal_throttle/core_throttle_count"
_GROUPS = tuple(Path(f"/sys/fs/cgroup/{name}cpu.stat") for name in ("", "cpu/", "cpu,cpuacct/"))

# Why the driver of a GPU lowers its clock, as its tool calls it; idling is no reason to worry.
_GPU_REASONS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


class Moment(NamedTuple):
    """Counters since the system started, and how fast the processor is now.

    Attributes:
        busy_s: Of all cores and all processes; `own_s` of this process and those of its children that ended.
        stolen_s: Wanted by this virtual machine and given to another one.
        throttled_s: Withheld from the control group by its quota.
        throttles: How often a core was slowed down because of its heat.
        loop_s: The fastest of some runs of a fixed loop.
    """

    wall_s: float
    own_s: float
    busy_s: float | None
    stolen_s: float | None
    throttled_s: float | None
    throttles: int | None
    load: float | None
    loop_s: float


def moment() -> Moment:
    """The counters and the clock of now; takes some ten milliseconds."""
    loop_s = min(_time_of_the_loop() for _ in range(_LOOPS))
    busy_s, stolen_s = _processor_seconds()
    return Moment(
        wall_s=time.monotonic(),
        own_s=sum(os.times()[:4]),
        busy_s=busy_s,
        stolen_s=stolen_s,
        throttled_s=_throttled_s(),
        throttles=_throttles(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        loop_s=loop_s,
    )


def between(before: Moment, after: Moment, *, device: str = "cpu") -> dict[str, Any]:
    """What happened between two moments, as it is kept beside the records.

    `others_share` and `stolen_share` are shares of the time of all cores.
    """
    wall_s = after.wall_s - before.wall_s
    all_s = max(wall_s, 1e-9) * (os.cpu_count() or 1)
    busy_s, own_s = _difference(before.busy_s, after.busy_s), after.own_s - before.own_s
    stolen_s = _difference(before.stolen_s, after.stolen_s)
    return {
        "wall_s": wall_s,
        # The system counts in hundredths of a second, so that little work may come out below none.
        "others_share": None if busy_s is None else max(busy_s - own_s, 0.0) / all_s,
        "stolen_share": None if stolen_s is None else stolen_s / all_s,
        "throttled_s": _difference(before.throttled_s, after.throttled_s),
        "throttles": _difference(before.throttles, after.throttles),
        "load_1min_before": before.load,
        "load_1min_after": after.load,
        "loop_before_s": before.loop_s,
        "loop_after_s": after.loop_s,
        "gpu_slowed_by": _gpu_slowed_by(device),
    }


def waited_s() -> float | None:
    """Seconds that the threads of this process stood ready to run and were not let, since they began."""
    try:
        threads = list(Path("/proc/self/task").iterdir())
        return sum(int((thread / "schedstat").read_text().split()[1]) for thread in threads) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def _time_of_the_loop() -> float:
    start = time.perf_counter()
    for _ in range(_LOOP_STEPS):
        pass
    return time.perf_counter() - start


def _processor_seconds() -> tuple[float | None, float | None]:
    """Busy and stolen seconds of all cores: user, nice, system, irq, softirq; and steal."""
    try:
        words = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
        user, nice, system, _, _, irq, softirq, stolen = (
            int(word) / os.sysconf("SC_CLK_TCK") for word in words
        )
    except (OSError, ValueError, AttributeError):
        return None, None
    return user + nice + system + irq + softirq, stolen


def _throttled_s() -> float | None:
    for file in _GROUPS:
        try:
            text = file.read_text()
        except OSError:
            continue
        # The second version counts microseconds, the first nanoseconds.
        for name, unit in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):
            found = re.search(rf"^{name} (\d+)$", text, flags=re.MULTILINE)
            if found:
                return int(found[1]) * unit
    return None


def _throttles() -> int | None:
    root, _, pattern = _THROTTLES.partition("cpu*")
    try:
        counts = [int(file.read_text()) for file in Path(root).glob(f"cpu*{pattern}")]
    except (OSError, ValueError):
        return None
    return sum(counts) if counts else None


def _gpu_slowed_by(device: str) -> list[str] | None:
    if not device.startswith("cuda"):
        return None
    index = device.partition(":")[2] or "0"
    wanted = ",".join(f"clocks_throttle_reasons.{reason}" for reason in _GPU_REASONS)
    answer = ask(["nvidia-smi", f"--id={index}", f"--query-gpu={wanted}", "--format=csv,noheader"])
    if answer is None:
        return None
    states = answer.split(", ")
    return [reason for reason, state in zip(_GPU_REASONS, states, strict=False) if state.strip() == "Active"]


def _difference(before: Any, after: Any) -> Any:
    return None if before is None or after is None else after - before
