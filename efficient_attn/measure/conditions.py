"""Conditions on the machine during a measurement: background load, CPU steal, clock drift, GPU state.

The figures are approximate, and depend on the system; unknown figures are None.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from efficient_attn.measure.environment import ask_driver

# Fields of records on the state of a GPU: the name at the driver, and the function of its answer.
_GPU_STATE: dict[str, tuple[str, Callable[[str], Any]]] = {
    "sm_clock_hz": ("clocks.sm", lambda text: 1e6 * float(text.removesuffix(" MHz"))),
    "memory_clock_hz": ("clocks.mem", lambda text: 1e6 * float(text.removesuffix(" MHz"))),
    "power_w": ("power.draw", lambda text: float(text.removesuffix(" W"))),
    "temperature_c": ("temperature.gpu", float),
    "power_state": ("pstate", str),
    "throttle_reasons": ("clocks_event_reasons.active", lambda text: int(text, 16)),
}

# A fixed loop: long enough for the clock, short enough that one of the runs is not preempted.
_LOOP_STEPS, _LOOPS = 20_000, 100


class Moment(NamedTuple):
    """Counters since boot, and the current speed of the processor.

    Attributes:
        busy_s: Seconds of all cores in all processes; `own_s`: of this process and its finished children.
        stolen_s: CPU steal, seconds that the host gave to other virtual machines.
        loop_s: Shortest duration of a fixed loop.
    """

    wall_s: float
    own_s: float
    busy_s: float | None
    stolen_s: float | None
    loop_s: float


def moment() -> Moment:
    """Current counters and speed; takes about ten milliseconds."""
    loop_s = min(_time_of_the_loop() for _ in range(_LOOPS))
    busy_s, stolen_s = _processor_seconds()
    return Moment(time.monotonic(), sum(os.times()[:4]), busy_s, stolen_s, loop_s)


def between(before: Moment, after: Moment) -> dict[str, Any]:
    """Conditions between two moments, in the form stored with the records.

    `others_share` and `stolen_share` are shares of the time of all cores.
    """
    wall_s, own_s, busy_s, stolen_s, _ = (
        None if then is None or now is None else now - then for then, now in zip(before, after, strict=True)
    )
    all_s = max(wall_s or 0.0, 1e-9) * (os.cpu_count() or 1)
    return {
        "wall_s": wall_s,
        # The system counts in hundredths of a second, so that the difference may be slightly negative.
        "others_share": None if busy_s is None else max(busy_s - (own_s or 0.0), 0.0) / all_s,
        "stolen_share": None if stolen_s is None else stolen_s / all_s,
        "loop_before_s": before.loop_s,
        "loop_after_s": after.loop_s,
    }


def gpu_state(device: str) -> dict[str, Any]:
    """Clocks, power and throttling of a GPU now, by field of a record; None without an answer."""
    if not device.startswith("cuda"):
        return {}
    asked = ask_driver(device, [name for name, _ in _GPU_STATE.values()])
    return {field: _read(asked[name], read) for field, (name, read) in _GPU_STATE.items()}


def _read(text: str | None, read: Callable[[str], Any]) -> Any:
    # Some devices answer [N/A].
    if text is None or text.startswith("["):
        return None
    with suppress(ValueError):
        return read(text)
    return None


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
