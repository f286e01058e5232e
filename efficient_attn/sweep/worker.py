"""One case in, one record out, whatever happens in between.

The case says everything, so that the call can be made in another process. What a backend refuses, what does
not fit into memory and what breaks is an answer like any other.
"""

import copy
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from efficient_attn.errors import AttentionError, UnsupportedError
from efficient_attn.measure import clock, memory
from efficient_attn.sweep.records import Case, Record

# A sample is worth little alone, and thousands of equal calls tell nothing new.
_FEWEST_CALLS, _MOST_CALLS = 1, 1000

# What torch's allocators say; the one of the CPU raises a plain RuntimeError.
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")

# A message of a backend becomes one line of at most this many characters.
_LONGEST_REASON = 300


def measure(case: Case, *, target: Any = None, seconds: float = 0.1) -> Record:
    """Measure one case: for a time about `seconds` of calls, for memory one call.

    Args:
        target: What to build, where `case.backend` alone does not tell: an object, or a path.
    """
    try:
        with _threads(case.threads):
            return _MEASURES[case.kind](case, case.backend if target is None else target, seconds)
    except AttentionError as refusal:
        return Record(case=case, status="unsupported", reason=_one_line(str(refusal)))
    except Exception as failure:  # The backend may be anybody's code: whatever it raises is its result.
        status = "oom" if _is_out_of_memory(failure) else "error"
        reason = _one_line(f"{type(failure).__name__}: {failure}")
    _give_memory_back(case.device)
    return Record(case=case, status=status, reason=reason)


def _measure_time(case: Case, target: Any, seconds: float) -> Record:
    _, call = _prepare(case, target)
    time_call = clock.clock(case.device)
    clock.warm_up(call, time_call, limit_s=seconds)
    times_s = clock.sample(call, time_call, seconds=seconds, least=_FEWEST_CALLS, most=_MOST_CALLS)
    return Record(case=case, times_s=times_s)


def _measure_memory(case: Case, target: Any, seconds: float) -> Record:
    backend, call = _prepare(case, target)
    # The first call may fill caches that later calls find filled.
    call()
    peak = memory.peak(call, device=case.device)
    return Record(
        case=case,
        peak_bytes=peak.peak_bytes,
        memory_method=peak.method,
        parameter_bytes=memory.parameter_bytes(backend),
        state_bytes=_state_bytes(case, backend),
    )


_MEASURES: dict[str, Callable[[Case, Any, float], Record]] = {
    "time": _measure_time,
    "memory": _measure_memory,
}


def _prepare(case: Case, target: Any) -> tuple[Any, Callable[[], object]]:
    """The backend, and the call to be measured: forward, or forward and backward."""
    import torch

    from efficient_attn.backends import build

    # What somebody else built is copied: moving it to a dtype or device must not change the original.
    own = target if isinstance(target, str) else copy.deepcopy(target)
    backend = build(
        own,
        head_dim=case.head_dim,
        num_heads=case.num_heads,
        max_tokens=case.tokens,
        causal=case.causal,
        **case.options,
    )
    backend = backend.to(device=case.device, dtype=getattr(torch, case.dtype)).eval()
    tensors = _inputs(case)
    return backend, _with_backward(backend, tensors) if case.backward else _forward(backend, tensors)


def _forward(backend: Any, tensors: tuple[Any, ...]) -> Callable[[], object]:
    import torch

    q, k, v, _ = tensors

    def call() -> object:
        with torch.no_grad():
            return backend(q, k, v)

    return call


def _with_backward(backend: Any, tensors: tuple[Any, ...]) -> Callable[[], object]:
    """Forward, then the gradients of q, k, v and of everything that the backend learns."""
    import torch

    if not backend.spec.capabilities.gradients:
        name = backend.spec.name
        raise UnsupportedError(f"Backend {name!r} has no gradients; measure it without --backward.")
    q, k, v = (tensor.detach().requires_grad_() for tensor in tensors[:3])
    learned = [parameter for parameter in backend.parameters() if parameter.requires_grad]

    def call() -> object:
        return torch.autograd.grad(backend(q, k, v), [q, k, v, *learned], tensors[3], allow_unused=True)

    return call


def _inputs(case: Case) -> tuple[Any, ...]:
    """Gaussian q, k, v and a gradient of the output, all [batch, heads, tokens, head_dim]."""
    shape = (case.batch, case.num_heads, case.tokens, case.head_dim)
    return _gaussian(shape, case.dtype, case.device, case.seed)


# The last ones are kept: all backends at a length read the same.
@functools.lru_cache(maxsize=1)
def _gaussian(shape: tuple[int, ...], dtype: str, device: str, seed: int) -> tuple[Any, ...]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(shape, generator=generator) for _ in range(4))
    return tuple(tensor.to(device=device, dtype=getattr(torch, dtype)) for tensor in drawn)


def _state_bytes(case: Case, backend: Any) -> int | None:
    """Bytes carried on after all tokens; None where the backend has no state."""
    import torch

    if not (case.causal and backend.spec.capabilities.streaming):
        return None
    q, k, v, _ = _inputs(case)
    with torch.no_grad():
        _, state = backend.extend(q, k, v)
    return memory.state_bytes(state)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)


def _is_out_of_memory(failure: Exception) -> bool:
    if isinstance(failure, MemoryError) or type(failure).__name__ == "OutOfMemoryError":
        return True
    return isinstance(failure, RuntimeError) and any(words in str(failure) for words in _OUT_OF_MEMORY)


def _give_memory_back(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST_REASON]
