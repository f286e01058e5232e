"""Workload of every backend, checked against this machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.measure.environment import usable_cores
from efficient_attn.measure.memory import ITEM_BYTES
from efficient_attn.problem import positive_count

# Subjects of a measurement: a backend alone, in a block, in a stack of blocks.
SUBJECTS = ("attention", "block", "encoder")

_DEFAULT_LAYERS = 3


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Workload of every backend; `settle` decides `auto` and None."""

    of: str = "attention"
    layers: int | None = None
    batch: int = 1
    num_heads: int = 8
    head_dim: int = 64
    causal: bool = False
    backward: bool = False
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    seed: int = 0

    @property
    def model_dim(self) -> int:
        """Model dimension: all heads together."""
        return self.num_heads * self.head_dim


def workloads(workload: Workload, *, of: str | Sequence[str]) -> tuple[Workload, ...]:
    """The settled workload for every subject of a measurement.

    Args:
        of: Some of SUBJECTS, as text joined by commas or one by one.

    Raises:
        OptionError: If they do not fit together.
    """
    subjects = dict.fromkeys(of.split(",") if isinstance(of, str) else of)
    if workload.layers is not None and "encoder" not in subjects:
        raise OptionError(f"layers belong to an encoder; of is {', '.join(subjects)!r}.")
    return tuple(
        settle(replace(workload, of=subject, layers=workload.layers if subject == "encoder" else None))
        for subject in subjects
    )


def settle(workload: Workload) -> Workload:
    """The workload with device, dtype and threads chosen, checked against this machine.

    Raises:
        OptionError, UnsupportedError: If it makes no sense, or this machine cannot do it.
    """
    if workload.of not in SUBJECTS:
        raise OptionError(f"of is {', '.join(SUBJECTS)}, not {workload.of!r}.")
    for name in ("batch", "num_heads", "head_dim"):
        positive_count(name, getattr(workload, name))
    device = _device(workload.device)
    dtype = _automatic_dtype(device) if workload.dtype == "auto" else workload.dtype
    if dtype not in ITEM_BYTES:
        raise OptionError(f"dtype is auto, {', '.join(ITEM_BYTES)}, not {dtype!r}.")
    layers = workload.layers
    if workload.of == "encoder":
        layers = _DEFAULT_LAYERS if layers is None else layers
        positive_count("layers", layers)
    return replace(workload, device=device, dtype=dtype, threads=_threads(workload.threads), layers=layers)


def _device(device: str) -> str:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise OptionError(f"device is auto, cpu, cuda or cuda:0, cuda:1, …, not {device!r}.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(f"device cannot be {device!r}: this torch sees no CUDA device. Use cpu.")
    if index and int(index) >= torch.cuda.device_count():
        raise OptionError(f"device cannot be {device!r}: there are {torch.cuda.device_count()} CUDA devices.")
    return device


def _automatic_dtype(device: str) -> str:
    """The half precision in which a GPU multiplies, or float32."""
    import torch

    if not device.startswith("cuda"):
        return "float32"
    with torch.cuda.device(device):
        # GPUs before Ampere emulate bfloat16, many times slower than float16.
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"


def _threads(threads: int | None) -> int:
    import torch

    if threads is None:
        return torch.get_num_threads()
    positive_count("threads", threads)
    if threads > usable_cores():
        raise OptionError(f"threads is at most the {usable_cores()} cores that can be used, not {threads}.")
    return threads
