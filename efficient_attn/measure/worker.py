"""Measurement of one case as one record.

The case is self-contained, so that the call can be made in another process. Refusals, out-of-memory errors
and exceptions are records too.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from efficient_attn.measure import clock, memory
from efficient_attn.measure.clock import QueuedCalls
from efficient_attn.measure.record import Case, Record, replace

if TYPE_CHECKING:
    from efficient_attn.measure.new_values import Values

# Seconds of timed calls, and most calls of a round: on a GPU each is timed twice, with slow flushes.
CALLS_S = 0.1
_MOST_CALLS, _MOST_CALLS_ON_CUDA = 1000, 200

Call = Callable[[], object]


def measure(case: Case, *, target: Any = None, seconds: float = CALLS_S, inputs: str | None = None) -> Record:
    """Measure the time of calls for about `seconds`, the memory of one call, or its error on given inputs.

    Args:
        target: Backend to build, if `case.backend` is not sufficient: an object, or a path.
        inputs: File of the q, k, v that `case.inputs` names; None: a Gaussian draw.
    """

    # torch is loaded by the first measurement.
    from efficient_attn.measure import accuracy, calls

    if case.kind == "error" and inputs is not None:
        return accuracy.error_of_case(case, target, inputs)

    def measured() -> Record:
        prepared = calls.prepare(case, case.backend if target is None else target, inputs)
        if case.kind == "time":
            first = partial(prepared.values.first, prepared.checked)
            record = time_of(case, prepared.call, seconds=seconds, first=first, values=prepared.values)
        else:
            record = memory_of(case, prepared.call, first=prepared.checked)
            parameters, state = memory.parameter_bytes(prepared.module), calls.state_bytes(prepared)
            record = replace(record, parameter_bytes=parameters, state_bytes=state)
        return replace(record, calibrated_on=prepared.calibrated_on)

    return calls.answer(case, measured)


def time_of(
    case: Case,
    call: Call,
    *,
    seconds: float,
    first: Call | None = None,
    least: int = 1,
    once_s: float = math.inf,
    values: "Values | None" = None,
) -> Record:
    """Timed calls for about `seconds`, after a warm-up; with an L2 state also as many device times.

    Args:
        first: The same call with checks of its result; None: no checks.
        once_s: A call on the CPU that takes as many seconds is made once, and is its own warm-up.
        values: New values of the inputs before each call; None: a call has the same inputs each time.
    """
    results: list[object] = []
    time_call = clock.clock(case.device, case.threads)

    def timed() -> None:
        results.append(call())

    def renew() -> None:
        # The last result is given back before the next call, as without new values.
        results.clear()
        if values is not None:
            values.renew()

    def renewed(call: Call) -> float:
        renew()
        return time_call(call)

    last_s = clock.warm_up(timed, renewed, limit_s=seconds, first=first)
    times_s: tuple[float, ...] = (last_s,)
    on_cuda = case.device.startswith("cuda")
    if on_cuda:
        queued = QueuedCalls(call, case.device, renew)
        queued.warm_up()
    if on_cuda or last_s < once_s:
        most = _MOST_CALLS_ON_CUDA if on_cuda else _MOST_CALLS
        times_s = clock.sample(timed, renewed, seconds=seconds, least=least, most=most)
    remark = None if values is None else values.verify(*results)
    device_times_s = queued.times(len(times_s)) if on_cuda and case.l2 is not None else None
    sizes = (len(times_s),)
    return Record(case=case, reason=remark, times_s=times_s, device_times_s=device_times_s, round_sizes=sizes)


def memory_of(case: Case, call: Call, *, first: Call | None = None) -> Record:
    """Peak memory of one call; `first` is the same call with checks of its result."""
    # The first call fills caches, which are not part of the measurement.
    (first or call)()
    return Record(case=case, peak_bytes=memory.peak(call, device=case.device).peak_bytes)
