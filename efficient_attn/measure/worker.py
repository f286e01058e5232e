"""Measurement of one case as one record, whatever its call does."""

import math
from functools import partial
from typing import Any

from efficient_attn.measure import clock, memory
from efficient_attn.measure.clock import QueuedCalls
from efficient_attn.measure.memory import Call
from efficient_attn.measure.record import Case, Record, replace

# Calls of earlier rounds by their case, with the duration of the last call, while their inputs fit into
# these bytes.
_BUILT: dict[str, tuple[Any, float]] = {}
_MOST_BYTES = 1 << 30

# Seconds of timed calls, and most calls of a round: on a GPU each is timed twice, with slow flushes.
CALLS_S = 0.1
_MOST_CALLS, _MOST_CALLS_ON_CUDA = 1000, 200


def measure(
    case: Case, *, target: Any = None, seconds: float = CALLS_S, inputs: str | None = None, keep: bool = False
) -> Record:
    """Measure the time of calls for about `seconds`, the memory of one call, or its error on given inputs.

    Args:
        target: Backend to build, an object or a path, if `case.backend` is not sufficient.
        inputs: File of the q, k, v of an error; None: a Gaussian draw.
        keep: Whether a timed call is built once for all its rounds, in a process of one run.
    """
    # torch is loaded by the first measurement.
    from efficient_attn.measure import accuracy, calls

    if case.kind == "error" and inputs is not None:
        return accuracy.error_of_case(case, target, inputs)

    def measured() -> Record:
        # A call that fails is not used again.
        built, last_s = _BUILT.pop(case.key, (None, 0.0)) if case.kind == "time" else (None, 0.0)
        prepared = built or calls.prepare(case, case.backend if target is None else target)
        if case.kind == "time":
            values = prepared.values
            first = None if built else partial(values.first, prepared.checked)
            record = time_of(
                case, values.call, seconds=seconds, first=first, known_s=last_s, before=values.renew
            )
            record = replace(record, reason=values.verify())
            if keep and case.device == "cpu" and record.times_s:
                _BUILT[case.key] = prepared, record.times_s[-1]
                tensors = [x for call, _ in _BUILT.values() for x in call.inputs]
                if sum(x.numel() * x.element_size() for x in tensors) > _MOST_BYTES:
                    del _BUILT[case.key]
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
    known_s: float = 0.0,
    before: Call = lambda: None,
) -> Record:
    """Time calls for about `seconds`, after a warm-up. With an L2 state, also measure device times.

    Args:
        first: The same call with checks of its result; None: no checks.
        once_s: A CPU call of at least this many seconds is timed once, without a warm-up.
        known_s: Duration of the same call in an earlier round; half of `seconds` need no warm-up.
        before: Untimed preparation of each call.
    """
    clocked = clock.clock(case.device, case.threads)

    def time_call(call: Call) -> float:
        before()
        return clocked(call)

    last_s = known_s
    if known_s < seconds / 2 or not known_s:
        last_s = clock.warm_up(call, time_call, limit_s=0.0 if known_s else seconds, first=first)
    times_s: tuple[float, ...] = (last_s,)
    device_times_s = None
    if case.device.startswith("cuda"):
        queued = QueuedCalls(call, case.device, before)
        queued.warm_up()
        times_s = clock.sample(call, time_call, seconds=seconds, least=least, most=_MOST_CALLS_ON_CUDA)
        device_times_s = None if case.l2 is None else queued.times(len(times_s))
    elif last_s < once_s:
        times_s = clock.sample(call, time_call, seconds=seconds, least=least, most=_MOST_CALLS)
    return Record(case=case, times_s=times_s, device_times_s=device_times_s, round_sizes=(len(times_s),))


def memory_of(case: Case, call: Call, *, first: Call | None = None) -> Record:
    """Peak memory of one call. `first` is the same call with checks of its result."""
    # The first call fills caches, which are not part of the measurement.
    (first or call)()
    return Record(case=case, peak_bytes=memory.peak(call, device=case.device).peak_bytes)
