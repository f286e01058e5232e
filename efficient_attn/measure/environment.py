"""The machine and software of a measurement, without any name of a person or host; conditions meanwhile.

Figures are approximate, and depend on the system; unknown figures are None.
"""

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

# The only recorded variables: they affect speed or results and hold no secrets.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "EFFICIENT_ATTN_KERNELS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
PACKAGES = ("efficient-attn", "numpy", "torch", "transformers", "triton")

# Entries from a GPU's driver: its version, and the highest clock.
_DRIVER = ("driver_version", "clocks.max.sm")

# Time limit of a query to git or the driver.
_PATIENCE_S = 5

# An absolute path, at the start of a word or after a separator between a flag or name and its value.
_PATH = re.compile(r"(?:(?<=^)|(?<=[=,:\s]))(?:~?/|[A-Za-z]:\\)[^,:\s]*")

_CONTROL_GROUP = Path("/sys/fs/cgroup")


def environment(*, command: Sequence[str] = (), device: str = "cpu") -> dict[str, Any]:
    """Description of machine and software, written with the records."""
    import torch

    folder, git = Path(__file__).resolve().parents[2], None
    # An installed package has no source tree.
    if (folder / ".git").exists():
        describe = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
        git = _output_of("git", "-C", str(folder), *describe)
    return {
        "command": [_PATH.sub(lambda path: _short(path.group()), word) for word in command],
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
        "git": git and {"commit": git.removesuffix("-dirty"), "clean": not git.endswith("-dirty")},
        "torch": {
            "version": torch.__version__,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        },
        "gpu": _gpu(device) if device.startswith("cuda") else None,
    }


def usable_cores() -> int:
    """Number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_bytes(device: str = "cpu") -> int | None:
    """Free memory of the device; None if unknown."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    limits = [_entry("/proc/meminfo", "MemAvailable")]
    # A control group may have a limit of its own.
    with suppress(OSError, ValueError):
        limit, used = ((_CONTROL_GROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        limits.append(None if limit == "max" else max(int(limit) - int(used), 0))
    return min((limit for limit in limits if limit is not None), default=None)


def _short(path: str) -> str:
    here = f"{os.getcwd()}/"
    return path.removeprefix(here) if path.startswith(here) else re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def _entry(path: str, name: str) -> Any:
    """Value of the first line `name: value` of a system file; amounts in bytes, None without one."""
    try:
        value = re.search(rf"^{name}\s*:\s*(.+?)( kB)?$", Path(path).read_text(), flags=re.MULTILINE)
    except OSError:
        return None
    return value and (int(value[1]) * 1024 if value[2] else value[1].strip())


def _gpu(device: str) -> dict[str, Any]:
    """Name, memory and driver of a GPU, the latter in the words of nvidia-smi; None if it gives none."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    # CUDA_VISIBLE_DEVICES renumbers the devices; the driver knows each by its name.
    query = (f"--id=GPU-{properties.uuid}", f"--query-gpu={','.join(_DRIVER)}", "--format=csv,noheader")
    values = (_output_of("nvidia-smi", *query) or "").split(", ")
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        **dict(zip(_DRIVER, values if len(values) == len(_DRIVER) else [None, None], strict=True)),
    }


def _output_of(*command: str) -> str | None:
    """Output of a program; None if it is missing, fails or exceeds the time limit."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


class Moment(NamedTuple):
    """Processor seconds since boot: of other processes, and of all cores."""

    others_s: float
    all_s: float


def moment() -> Moment | None:
    """Current counters; None if the system has none."""
    try:
        words = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
        ticks_per_s = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return None
    user, nice, system, idle, waiting, irq, softirq, stolen = (int(word) / ticks_per_s for word in words)
    busy_s = user + nice + system + irq + softirq + stolen
    return Moment(busy_s - sum(os.times()[:4]), busy_s + idle + waiting)


def between(before: Moment | None, after: Moment | None) -> dict[str, Any]:
    """Conditions between two moments: the share of the time of all cores that others took."""
    if before is None or after is None:
        return {"others_share": None}
    # The system counts in hundredths of a second, so that the difference may be slightly negative.
    others_s, all_s = after.others_s - before.others_s, after.all_s - before.all_s
    return {"others_share": max(others_s, 0.0) / max(all_s, 1e-9)}
