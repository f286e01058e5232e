"""Workload of every backend, checked against this machine, and the points of its costs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.measure import isolation
from efficient_attn.measure.environment import available_bytes, free_cores, usable_cores
from efficient_attn.measure.isolation import NONE, Measurer
from efficient_attn.measure.memory import ITEM_BYTES
from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.units import parse_bytes, show_bytes
from efficient_attn.measure.variants import Variant, has_address
from efficient_attn.problem import positive_count
from efficient_attn.runs.study import Point

# Subjects of a measurement: a backend alone, in a block, in a stack of blocks.
SUBJECTS = ("attention", "block", "encoder")

_DEFAULT_LAYERS = 3

# Alive at once: score matrices (scores and weights) and vectors of a token (q, k, v, output).
_MATRICES, _VECTORS = 2, 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Shape, dtype and device of every call. `settle` decides `auto` and None."""

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


def settle(workload: Workload, *, timed: bool = True) -> Workload:
    """The workload with device, dtype and threads chosen, checked against this machine.

    Other processes take cores from the threads of timed calls. Errors have equal threads at any load.
    """
    # Help texts are shown without torch.
    import torch

    if workload.of not in SUBJECTS:
        raise OptionError(f"of is {', '.join(SUBJECTS)}, not {workload.of!r}.")
    for name in ("batch", "num_heads", "head_dim"):
        positive_count(name, getattr(workload, name))
    device, dtype, layers = _device(workload.device), workload.dtype, workload.layers
    if dtype == "auto":
        dtype = "float32"
        if device.startswith("cuda"):
            with torch.cuda.device(device):
                # GPUs before Ampere emulate bfloat16, many times slower than float16.
                fast = torch.cuda.is_bf16_supported(including_emulation=False)
            dtype = "bfloat16" if fast else "float16"
    if dtype not in ITEM_BYTES:
        raise OptionError(f"dtype is auto, {', '.join(ITEM_BYTES)}, not {dtype!r}.")
    if workload.of == "encoder":
        layers = _DEFAULT_LAYERS if layers is None else layers
        positive_count("layers", layers)
    threads = torch.get_num_threads() if workload.threads is None else workload.threads
    if timed and workload.threads is None and device == "cpu" and threads > 1:
        # A parallel region waits for its slowest thread, which waits for its core.
        threads = min(threads, free_cores())
    positive_count("threads", threads)
    if workload.threads is not None and threads > usable_cores():
        raise OptionError(f"threads is at most the {usable_cores()} cores that can be used, not {threads}.")
    return replace(workload, device=device, dtype=dtype, threads=threads, layers=layers)


def core_words(settled: Workload, threads: int | None) -> str | None:
    """`1 of 2 cores free`, or None where the option `threads` or the library chose the threads."""
    import torch

    cores = usable_cores()
    chosen = settled.threads == cores or (settled.threads or 0) < torch.get_num_threads()
    shown = threads is None and settled.device == "cpu" and cores > 1 and chosen
    return f"{settled.threads} of {cores} cores free" if shown else None


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


def predict_bytes(case: Case, memory_growth: int) -> int:
    """Bytes of the vectors of attention, and of score matrices if memory grows with n²."""
    item = ITEM_BYTES[case.dtype]
    vectors = _VECTORS * item * case.batch * case.tokens * case.model_dim
    matrix = item * case.batch * case.num_heads * case.tokens**2 if memory_growth > 1 else 0
    # The backward pass keeps the weights of every layer and has a gradient for every vector.
    retained = case.layers or 1 if case.backward else 0
    return (2 if case.backward else 1) * vectors + (_MATRICES + retained) * matrix


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Points of time, peak memory and error of calls that share fields and differ in backend and length.

    Points that are predicted to need more than `limit_bytes` are skipped; `l2` is the state of the cache for
    device times.
    """

    shared: Mapping[str, Any]
    measure: Callable[..., Record]
    rounds: int
    limit_bytes: int | None = None
    l2: str | None = None

    def point(self, variant: Variant, tokens: int, kind: str = "time") -> Point:
        """The time of a call in rounds, its peak memory, or the error of its output."""
        l2 = self.l2 if kind == "time" else None
        case = variant.case(kind=kind, tokens=tokens, l2=l2, **self.shared)
        needed, limit, skip = predict_bytes(case, variant.memory_growth), self.limit_bytes, None
        if limit is not None and needed > limit:
            skip = f"needs about {show_bytes(needed)}, the limit is {show_bytes(limit)}"
            skip = f"{skip} (raise memory_limit in Python)"
        # Every error is one against the exact output.
        growth = 2 if kind == "error" else variant.time_growth
        return Point(
            case=case,
            measure=partial(self.measure, case, target=variant.target),
            rounds=self.rounds if kind == "time" else 0,
            label=f"{variant.label}, {tokens} tokens of {case.inputs}, error" if kind == "error" else None,
            series=(case.label, case.of),
            cost=case.batch * float(tokens) ** growth,
            skip=skip,
        )


def measurer_for(
    variants: Sequence[Variant],
    workload: Workload,
    *,
    isolate: str | None = None,
    timeout_s: float = isolation.DEFAULT_TIMEOUT_S,
    memory_limit: str | int = "70%",
) -> tuple[Measurer, int | None, list[str]]:
    """The measurer of these variants, its memory limit in bytes, and remarks.

    Objects that exist in this process only are measured here, and all others with them.
    """
    isolate = isolation.DEFAULT_ISOLATION if isolate is None else isolate
    limit = parse_bytes(memory_limit, name="memory_limit", available=available_bytes(workload.device))
    here = [variant.label for variant in variants if not has_address(variant.target)]
    # A driver of CUDA reserves more addresses than any limit allows.
    limit_bytes = limit if workload.device == "cpu" else None
    measurer = Measurer(NONE if here else isolate, timeout_s=timeout_s, limit_bytes=limit_bytes)
    if isolate == NONE or not here:
        return measurer, limit, []
    remark = f"Nothing was isolated: {here[0]!r} exists in this process only; name it as file.py:object."
    return measurer, limit, [remark]
