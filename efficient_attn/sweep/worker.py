"""One case in, one record out, whatever happens in between.

The case says everything, so that the call can be made in another process. What a backend refuses, what does
not fit into memory and what breaks is an answer like any other.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from efficient_attn.contained import contained, described, one_line
from efficient_attn.errors import AttentionError
from efficient_attn.measure import clock, conditions, memory
from efficient_attn.sweep.records import Case, Record

# A sample is worth little alone, and thousands of equal calls tell nothing new.
_FEWEST_CALLS, _MOST_CALLS = 1, 1000

# What torch's allocators say; the one of the CPU raises a plain RuntimeError.
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")

Call = Callable[[], object]


def measure(case: Case, *, target: Any = None, seconds: float = 0.1, inputs: str | None = None) -> Record:
    """Measure one case: for a time about `seconds` of calls, for memory one call.

    Args:
        target: What to build, where `case.backend` alone does not tell: an object, or a path.
        inputs: A file of the q, k, v that `case.inputs` names; None: a Gaussian draw.
    """
    own = case.backend if target is None else target
    return answer(case, lambda: _MEASURES[case.kind](case, own, seconds, inputs))


def answer(case: Case, measured: Callable[[], Record]) -> Record:
    """What `measured` returns with the threads of the case; or a record of what it raised."""
    try:
        with _threads(case.threads), contained():
            return measured()
    except AttentionError as refusal:
        return Record(case=case, status="unsupported", reason=one_line(str(refusal)))
    except Exception as failure:  # The backend may be anybody's code: whatever it raises is its result.
        status = "oom" if _is_out_of_memory(failure) else "error"
        reason = described(failure)
    _give_memory_back(case.device)
    return Record(case=case, status=status, reason=reason)


def time_of(
    case: Case, call: Call, *, seconds: float, first: Call | None = None, least: int = _FEWEST_CALLS
) -> Record:
    """About `seconds` of calls, after a warm-up.

    Args:
        first: The same call, its result checked; None: nothing is.
    """
    time_call = clock.clock(case.device)
    empty_call_s = clock.empty_call_s(time_call)
    clock.warm_up(call, time_call, limit_s=seconds, first=first)
    waited_before_s = conditions.waited_s()
    times_s = clock.sample(call, time_call, seconds=seconds, least=least, most=_MOST_CALLS)
    waited_s = conditions.waited_s()
    return Record(
        case=case,
        times_s=times_s,
        turn_sizes=(len(times_s),),
        waited_s=None if waited_s is None or waited_before_s is None else waited_s - waited_before_s,
        empty_call_s=empty_call_s,
    )


def memory_of(case: Case, call: Call, *, first: Call | None = None) -> Record:
    """The peak of one call; `first` is the same call, its result checked."""
    # The first call may fill caches that later calls find filled.
    (first or call)()
    peak = memory.peak(call, device=case.device)
    return Record(
        case=case,
        peak_bytes=peak.peak_bytes,
        requested_peak_bytes=peak.requested_bytes,
        memory_method=peak.method,
    )


def _measure_time(case: Case, target: Any, seconds: float, inputs: str | None) -> Record:
    from efficient_attn.sweep import calls
    from efficient_attn.sweep.counting import machine_rate

    prepared = calls.prepare(case, target, inputs)
    # Without a number of operations there is nothing to hold against the rate.
    rate = None if prepared.flops is None else machine_rate(case.dtype, case.device, case.threads)
    return replace(
        time_of(case, prepared.call, seconds=seconds, first=prepared.checked),
        flops=prepared.flops,
        matmul_flops_per_s=rate,
        calibrated_on=prepared.calibrated_on,
    )


def _measure_memory(case: Case, target: Any, seconds: float, inputs: str | None) -> Record:
    from efficient_attn.sweep import calls

    prepared = calls.prepare(case, target, inputs)
    return replace(
        memory_of(case, prepared.call, first=prepared.checked),
        parameter_bytes=memory.parameter_bytes(prepared.module),
        state_bytes=calls.state_bytes(prepared),
        calibrated_on=prepared.calibrated_on,
    )


_MEASURES: dict[str, Callable[[Case, Any, float, str | None], Record]] = {
    "time": _measure_time,
    "memory": _measure_memory,
}


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
    return isinstance(failure, RuntimeError) and any(words in described(failure) for words in _OUT_OF_MEMORY)


def _give_memory_back(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()
