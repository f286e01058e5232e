"""Conditions on the machine during a measurement: background load, CPU steal, throttling, clock drift.

The figures are approximate, and depend on the system; unknown figures are None.
"""

import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from efficient_attn.measure.environment import ask

# A fixed loop: long enough for the clock, short enough that one of the runs is not preempted.
_LOOP_STEPS, _LOOPS = 20_000, 100

_THROTTLES = "/sys/devices/system/cpu/cpu*/thermal_throttle/core_throttle_count"
_GROUPS = tuple(Path(f"/sys/fs/cgroup/{name}cpu.stat") for name in ("", "cpu/", "cpu,cpuacct/"))

# Reasons for lowered GPU clocks, as named by nvidia-smi; idling is harmless.
_GPU_REASONS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


class Moment(NamedTuple):
    """Counters since boot, and the current speed of the processor.

    Attributes:
        busy_s: Seconds of all cores in all processes; `own_s`: of this process and its finished children.
        stolen_s: CPU steal, seconds that the host gave to other virtual machines.
        throttled_s: Seconds withheld by the quota of the control group.
        throttles: Number of thermal throttling events.
        loop_s: Shortest duration of a fixed loop.
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
    """Current counters and speed; takes about ten milliseconds."""
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
    """Conditions between two moments, in the form stored with the records.

    `others_share` and `stolen_share` are shares of the time of all cores.
    """
    wall_s = after.wall_s - before.wall_s
    all_s = max(wall_s, 1e-9) * (os.cpu_count() or 1)
    busy_s, own_s = _difference(before.busy_s, after.busy_s), after.own_s - before.own_s
    stolen_s = _difference(before.stolen_s, after.stolen_s)
    return {
        "wall_s": wall_s,
        # The system counts in hundredths of a second, so that the difference may be slightly negative.
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
    """Run-queue wait: seconds that threads of this process were ready to run but not running."""
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
        # cgroup v2 counts microseconds, v1 nanoseconds.
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
