"""The machine, software and conditions of a measurement, without any name of a person or host.

Figures are approximate, and depend on the system; unknown figures are None.
"""

import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

# The only recorded variables: they affect speed or results and hold no secrets.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "EFFICIENT_ATTN_KERNELS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
PACKAGES = ("efficient-attn", "numpy", "torch", "transformers", "triton")

# An absolute path, at the start of a word or after a separator between a flag or name and its value.
_PATH = re.compile(r"(?:(?<=^)|(?<=[=,:\s]))(?:~?/|[A-Za-z]:\\)[^,:\s]*")

# Seconds of a reading of the load, and share of a core that others may take of a free one.
_READING_S, _NEARLY_FREE = 0.3, 0.2

_CONTROL_GROUP = Path("/sys/fs/cgroup")


def environment(*, command: Sequence[str] = (), device: str = "cpu") -> dict[str, Any]:
    """Description of machine and software, written with the records."""
    import torch

    from efficient_attn.ops.paths import bfloat16_instructions

    return {
        "command": list(map(without_home, command)),
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": _entry("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cores_usable": usable_cores(),
        "packages": {
            name: next((package.version for package in importlib.metadata.distributions(name=name)), None)
            for name in PACKAGES
        },
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "torch": {
            "version": torch.__version__,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "bfloat16": bfloat16_instructions(),
            "threads": torch.get_num_threads(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        },
        "gpu": _gpu(device) if device.startswith("cuda") else None,
    }


def without_home(text: str) -> str:
    """The text with the last names of absolute paths alone, which may hold the name of a person."""
    return _PATH.sub(lambda path: _short(path.group()), text)


def usable_cores() -> int:
    """Number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_cores() -> int:
    """Number of cores that other processes leave free, read over 0.3 s, at least 1."""
    before = moment()
    time.sleep(_READING_S)
    share = between(before, moment())["others_share"] or 0.0
    # The system counts all its cores, also those that this process may not use.
    free = (1 - share) * (os.cpu_count() or 1) + _NEARLY_FREE
    return max(1, min(usable_cores(), int(free)))


def available_bytes(device: str = "cpu") -> int | None:
    """Free memory of the device, or None if unknown."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    limits = [_entry("/proc/meminfo", "MemAvailable")]
    # A control group may have a limit of its own, or "max" for none.
    with suppress(OSError, ValueError):
        limit, used = (int((_CONTROL_GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        limits.append(max(limit - used, 0))
    return min((limit for limit in limits if limit is not None), default=None)


def _short(path: str) -> str:
    here = f"{os.getcwd()}/"
    return path.removeprefix(here) if path.startswith(here) else re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def _entry(path: str, name: str) -> Any:
    """Value of the first line `name: value` of a system file, or None. Amounts are in bytes."""
    try:
        value = re.search(rf"^{name}\s*:\s*(.+?)( kB)?$", Path(path).read_text(), flags=re.MULTILINE)
    except OSError:
        return None
    return value and (int(value[1]) * 1024 if value[2] else value[1].strip())


def _gpu(device: str) -> dict[str, Any]:
    import torch

    from efficient_attn.ops import verdict

    return {
        "name": torch.cuda.get_device_name(device),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
        "cuda": torch.version.cuda,
        "driver_version": verdict.driver_version(),
    }


class Moment(NamedTuple):
    """Processor seconds since boot: of other processes, and of all cores."""

    others_s: float
    all_s: float


def moment() -> Moment | None:
    """Current counters, None on a system without them."""
    try:
        words = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
        ticks_per_s = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return None
    user, nice, system, idle, waiting, irq, softirq, stolen = (int(word) / ticks_per_s for word in words)
    busy_s = user + nice + system + irq + softirq + stolen
    return Moment(busy_s - sum(os.times()[:4]), busy_s + idle + waiting)


def between(before: Moment | None, after: Moment | None) -> dict[str, Any]:
    """Conditions between two moments: share of all cores' time that other processes took."""
    if before is None or after is None:
        return {"others_share": None}
    # The system counts in hundredths of a second, so that the difference may be slightly negative.
    others_s, all_s = after.others_s - before.others_s, after.all_s - before.all_s
    return {"others_share": max(others_s, 0.0) / max(all_s, 1e-9)}
