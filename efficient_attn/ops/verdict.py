"""Verdicts of `efficient-attn gpu-check` on fused kernels: which of them serve calls on this machine.

No kernel serves a call on a machine on which its own check has not passed, and none where PyTorch's operators
were measured faster there. A verdict holds for one GPU, driver, PyTorch, Triton and assembler (ptxas), and
for the source of the kernel: after any change there is none. Kernels that PyTorch ships compiled, its fused
attention and `varlen_attn`, are tested by PyTorch and do not come under this rule; FlexAttention, compiled on
the machine, does.
"""

import hashlib
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from efficient_attn.ops import paths

# Files of `ops` that make up each kernel, prepare its inputs or compute their factors.
SOURCES = {
    "flex": ("*.py", "softmax/*.py", "linear/*.py"),
    "window-flex": ("*.py", "softmax/*.py", "window/*.py"),
    "window-global": ("*.py", "softmax/*.py", "window/*.py"),
    "blocks-flex": ("*.py", "softmax/*.py"),
    "causal-linear": ("*.py", "softmax/*.py", "linear/*.py", "cuda/*.py"),
}
# Tiles of each kernel in the order of choice; of our kernels the numbers in their table.
TILES = dict.fromkeys(SOURCES, ("",)) | {"causal-linear": ("0", "1", "2")}
PASSED, FAILED, SLOWER, REFUSED = OUTCOMES = ("passed", "failed", "slower", "refused")
# ptxas before CUDA 13.3 may reuse registers of an operand before `wgmma` of Hopper has read them (triton
# PR 11781). On an H200, gradients of `causal-linear` by 12.8.93 were off by 88 %, and right by 13.4.59.
SAFE_PTXAS = (13, 3)
# Triton reads the second variable for newer GPUs, from 3.9 on for Hopper too.
PTXAS_VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")

# Tiles by kernel in place of the file: kernels that are being checked. None: the file decides.
_TRIAL: Mapping[str, str] | None = None
_WARNED: set[str] = set()


@paths.constant_result
def trusted(kernel: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel of SOURCES may serve calls of a dtype on a device. Warns once without a verdict."""
    return tile(kernel, device, dtype) is not None


@paths.constant_result
def tile(kernel: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Name of the tile with which the kernel passed its check, or None if the kernel may not serve."""
    if _TRIAL is not None:
        return _TRIAL.get(kernel)
    if paths.only_torch() or not paths.compiles(device):
        return None
    # FlexAttention serves float32 only with TF32.
    tf32 = dtype is torch.float32 and kernel != "causal-linear"
    entry = entry_of(kernel, device, "tf32" if tf32 else str(dtype).removeprefix("torch."))
    if entry is None:
        _warn(device)
    return entry["tile"] if entry is not None and entry["outcome"] == PASSED else None


@contextmanager
def on_trial(tiles: Mapping[str, str]) -> Iterator[None]:
    """Let only these kernels serve, with these tiles, regardless of verdicts."""
    global _TRIAL
    before, _TRIAL = _TRIAL, tiles
    try:
        yield
    finally:
        _TRIAL = before


@cache
def entry_of(kernel: str, device: torch.device, precision: str) -> dict[str, Any] | None:
    """Entry of the verdict for a kernel in a precision, or None."""
    key = machine(device)
    stored = read_verdict(key).get(kernel, {})
    if stored.get("source") != source_hash(kernel) or refusal(key["capability"], key["ptxas"]):
        return None
    entry: dict[str, Any] | None = stored.get("precisions", {}).get(precision)
    return entry


def read_verdict(key: Mapping[str, str]) -> dict[str, Any]:
    """Verdict on each kernel of a machine, empty without a file or with one of another machine."""
    try:
        content = json.loads(path_of(key).read_text(encoding="utf-8"))
        valid = content["machine"] == dict(key) and isinstance(content["kernels"], dict)
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return content["kernels"] if valid else {}


def write(key: Mapping[str, str], kernels: Mapping[str, Any]) -> Path:
    """Write the verdict of a machine to the user's cache folder. Later calls of this process read it.

    Raises:
        OSError: If the file cannot be written.
    """
    path = path_of(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({"machine": dict(key), "kernels": kernels}, indent=2), encoding="utf-8")
    os.replace(part, path)
    entry_of.cache_clear()
    return path


def path_of(key: Mapping[str, str]) -> Path:
    """File of the verdict of a machine. Machines that share a home folder have separate files."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
    return Path(folder) / "efficient-attn" / f"gpu-{digest}.json"


def machine(device: torch.device) -> dict[str, str]:
    """The GPU and the software on which the code of a kernel depends."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver_version(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if find_spec("triton") else "none",
        "ptxas": ", ".join(sorted({ptxas_version(path) for path in assemblers(device)})) or "none",
    }


@cache
def source_hash(kernel: str) -> str:
    digest = hashlib.sha256()
    for pattern in SOURCES[kernel]:
        for file in sorted(Path(__file__).parent.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def driver_version() -> str:
    """Version of the driver, or the CUDA version that it supports where the kernel module is hidden."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        text = ""
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    if version:
        return version[0]
    # Absent in builds for the CPU.
    number: Callable[[], int] = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)
    return f"CUDA {number()}"


def assemblers(device: torch.device) -> list[str]:
    """Paths of the assemblers that kernels for a device may pass through.

    Where the environment names none, `torch.compile` puts the one of PyTorch in place of Triton's for all
    that its process compiles from then on.
    """
    try:
        compiler = importlib.import_module("triton.backends.nvidia.compiler")
    except ImportError:
        return []
    major, minor = torch.cuda.get_device_capability(device)
    chosen = str(compiler.get_ptxas(10 * major + minor).path)
    folder = Path(torch.__file__).parent
    of_torch = [str(path) for path in (folder / "bin/ptxas", folder / "_inductor/bin/ptxas") if path.exists()]
    named = os.environ.get(PTXAS_VARIABLES[0])
    if Path(chosen).name == "ptxas-blackwell" or named not in (None, *of_torch):
        return [chosen]
    of_triton = str(Path(str(compiler.__file__)).parent / "bin/ptxas") if chosen in of_torch else chosen
    return [of_triton, *of_torch]


@cache
def ptxas_version(path: str) -> str:
    """Version of an assembler, such as 12.8.93, or "unknown" if it does not run."""
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    match = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    return match[1] if match else "unknown"


def refusal(capability: str, version: str) -> str | None:
    """Reason why no kernel serves a GPU with these assemblers, or None."""
    if capability.partition(".")[0] != "9" or all(_numbers(x) >= SAFE_PTXAS for x in version.split(", ")):
        return None
    return f"ptxas {version} may miscompile wgmma on Hopper; 13.3 or later is needed"


def newer_ptxas() -> str | None:
    """Path of a safe assembler on this machine, from Triton, NVIDIA's packages or a CUDA toolkit."""
    triton = find_spec("triton")
    folders = [Path(place) for place in (triton.submodule_search_locations or ())] if triton else []
    candidates = [
        *(file for folder in folders for file in (folder / "backends/nvidia/bin").glob("ptxas*")),
        *(file for folder in folders for file in folder.parent.glob("nvidia/*/bin/ptxas")),
        *Path("/usr/local").glob("cuda*/bin/ptxas"),
        *filter(None, [shutil.which("ptxas")]),
    ]
    safe = [path for path in map(str, candidates) if _numbers(ptxas_version(path)) >= SAFE_PTXAS]
    return max(safe, key=lambda path: _numbers(ptxas_version(path)), default=None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")) if version[:1].isdigit() else ()


def _warn(device: torch.device) -> None:
    """Warn, once in a process, that operators serve."""
    if _WARNED:
        return
    key = machine(device)
    _WARNED.add(key["gpu"])
    text = (
        f"PyTorch's operators serve attention on {key['gpu']}, since no fused kernel was checked with driver "
        f"{key['driver']}, torch {key['torch']}, triton {key['triton']} and ptxas {key['ptxas']}. "
        f"`efficient-attn gpu-check` checks them; {paths.VARIABLE}=torch turns this warning off."
    )
    if refusal(key["capability"], key["ptxas"]):
        text += f" Kernels for this GPU need ptxas 13.3 or later: {export_line()}"
    warnings.warn(text, stacklevel=2)


def export_line() -> str:
    """Shell command that makes Triton use a safe assembler."""
    path = newer_ptxas() or "/path/to/a/ptxas/of/CUDA/13.3"
    return "export " + " ".join(f"{name}={path}" for name in PTXAS_VARIABLES)
