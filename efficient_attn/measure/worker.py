"""Measurement of one case as one record.

The case is self-contained, so that the call can be made in another process. Refusals, out-of-memory errors
and exceptions are records too.
"""

import faulthandler
import gc
import json
import math
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from efficient_attn.contained import contained, described, one_line
from efficient_attn.errors import AttentionError
from efficient_attn.measure import clock, environment, memory
from efficient_attn.measure.clock import COLD, QueuedCalls, ceilings
from efficient_attn.measure.record import Case, Record, line, replace

# Seconds of timed calls; bounds on their number per round.
CALLS_S = 0.1
_FEWEST_CALLS, _MOST_CALLS = 1, 1000

# Bound on a GPU, where each call is timed twice and flushes take longer than short calls.
_MOST_CALLS_ON_CUDA = 200

# Messages of torch's allocators; the CPU allocator raises a plain RuntimeError.
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")

# First message of a process that has loaded everything.
READY = b"ready"

# Address space that threads and libraries reserve without using it; excluded from the limit.
_RESERVED_BYTES = 1 << 30

# The parent kills late children; if it is gone and C code hangs, the child ends itself this much later.
_GRACE_S, _LONGEST_S = 5.0, 1e6

Call = Callable[[], object]


def measure(case: Case, *, target: Any = None, seconds: float = CALLS_S, inputs: str | None = None) -> Record:
    """Measure one case: calls for about `seconds`, or the memory of one call.

    Args:
        target: Backend to build, if `case.backend` is not sufficient: an object, or a path.
        inputs: File of the q, k, v that `case.inputs` names; None: a Gaussian draw.
    """

    def measured() -> Record:
        # torch is loaded by the first measurement.
        from efficient_attn.measure import calls

        prepared = calls.prepare(case, case.backend if target is None else target, inputs)
        if case.kind == "time":
            record = time_of(case, prepared.call, seconds=seconds, first=prepared.checked)
            record = replace(record, flops=prepared.flops, moved_bytes=prepared.moved_bytes)
            # The state is read first: the product of the ceilings draws more power than most calls.
            record = replace(record, **_gpu_state(case))
            record = replace(record, **ceilings(case.device, case.dtype)._asdict())
        else:
            record = memory_of(case, prepared.call, first=prepared.checked)
            parameters, state = memory.parameter_bytes(prepared.module), calls.state_bytes(prepared)
            record = replace(record, parameter_bytes=parameters, state_bytes=state)
        return replace(record, calibrated_on=prepared.calibrated_on)

    return answer(case, measured)


def answer(case: Case, measured: Callable[[], Record]) -> Record:
    """Result of `measured` under the thread count of the case, or a record of its exception."""
    try:
        # torch is loaded by the first measurement.
        from efficient_attn.ops.paths import observed_kernels, only_torch

        with threads(case.threads), contained(), observed_kernels() as names:
            record = measured()
        # Fused kernels that ran, or else algorithms for the CPU or PyTorch's operators.
        others = "cpu" if case.device == "cpu" and not only_torch() else "torch"
        return replace(record, kernels=", ".join(sorted(names)) or others)
    except AttentionError as refusal:
        return Record(case=case, status="unsupported", reason=one_line(str(refusal)))
    except Exception as failure:  # the backend may be external code: any exception is a result
        reason = described(failure)
        exhausted = isinstance(failure, MemoryError) or type(failure).__name__ == "OutOfMemoryError"
        worded = isinstance(failure, RuntimeError) and any(words in reason for words in _OUT_OF_MEMORY)
        status = "oom" if exhausted or worded else "error"
    gc.collect()
    if case.device.startswith("cuda"):
        import torch

        # An illegal memory access ends the context of this process, and every later call raises it again.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
    return Record(case=case, status=status, reason=reason)


def time_of(
    case: Case,
    call: Call,
    *,
    seconds: float,
    first: Call | None = None,
    least: int = _FEWEST_CALLS,
    once_s: float = math.inf,
) -> Record:
    """Timed calls for about `seconds`, after a warm-up; with an L2 state also as many device times.

    Args:
        first: The same call with checks of its result; None: no checks.
        once_s: A call on the CPU that takes as many seconds is made once, and is its own warm-up.
    """
    time_call = clock.clock(case.device, case.threads)
    waited_before_s = environment.waited_s()
    last_s = clock.warm_up(call, time_call, limit_s=seconds, first=first)
    queued = QueuedCalls(call, case.device, l2=case.l2 or COLD) if case.device.startswith("cuda") else None
    if queued is not None:
        queued.warm_up()
    most = _MOST_CALLS if queued is None else _MOST_CALLS_ON_CUDA
    times_s: tuple[float, ...] = (last_s,)
    if queued is not None or last_s < once_s:
        waited_before_s = environment.waited_s()
        times_s = clock.sample(call, time_call, seconds=seconds, least=least, most=most)
    waited_s = environment.waited_s()
    return Record(
        case=case,
        times_s=times_s,
        device_times_s=None if queued is None or case.l2 is None else queued.times(len(times_s)),
        round_sizes=(len(times_s),),
        waited_s=None if waited_s is None or waited_before_s is None else waited_s - waited_before_s,
    )


@cache
def _gpu_state(case: Case) -> dict[str, Any]:
    """State of the GPU, read in the first round of a case: the driver takes milliseconds to answer."""
    return environment.gpu_state(case.device)


def memory_of(case: Case, call: Call, *, first: Call | None = None) -> Record:
    """Peak memory of one call; `first` is the same call with checks of its result."""
    # The first call fills caches, which are not part of the measurement.
    (first or call)()
    peak = memory.peak(call, device=case.device)
    return Record(case=case, peak_bytes=peak.peak_bytes, memory_method=peak.method)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run torch on the CPU with this many threads."""
    import torch

    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)


def serve(requests: int, answers: int, limit_bytes: int | None) -> None:
    """Serve requests from a pipe, for ever; both pipes by their descriptors.

    The child process runs this function. Its stdout, which belongs to the backends, is redirected to stderr.
    It ends, with all its children, as soon as the parent is gone.
    """
    # Ctrl-C is ignored, so that a backend that sends itself SIGINT has no effect.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Started before torch is loaded, so that a parent that exits at once leaves no child behind.
    received: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    pipe = Connection(answers, readable=False)
    source = Connection(requests, writable=False)
    threading.Thread(target=_receive, args=(source, received), daemon=True).start()
    # torch is loaded before the first request, since it takes longer than most measurements.
    from efficient_attn.measure import calls  # noqa: F401  (part of the start-up, not of the first point)

    if limit_bytes is not None:
        _limit_memory(limit_bytes)
    pipe.send_bytes(READY)
    while True:
        pipe.send_bytes(_respond(received.get()).encode())


def _limit_memory(limit_bytes: int) -> None:
    """Refuse allocations beyond the limit, if the system reports current usage, as `limits_memory` tells."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    most = pages * resource.getpagesize() + limit_bytes + _RESERVED_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


def _respond(request: dict[str, Any]) -> str:
    with open(os.devnull, "wb") as nowhere:
        # faulthandler is the only timer in Python that needs no lock, which a hanging call may hold.
        end_s = min(request["limit_s"] + _GRACE_S, _LONGEST_S)
        faulthandler.dump_traceback_later(end_s, exit=True, file=nowhere)
        try:
            jobs = {"measure": _measure, "load": _load, "check": _check, "kernel": _kernel}
            return jobs[request["job"]](request)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _receive(pipe: Connection, received: "queue.SimpleQueue[dict[str, Any]]") -> None:
    """Queue requests; runs in a thread of its own, which notices the end of the parent at any time."""
    with suppress(EOFError, OSError):
        while True:
            received.put(json.loads(pipe.recv_bytes()))
    os.killpg(os.getpid(), signal.SIGKILL)


def _measure(request: Mapping[str, Any]) -> str:
    from efficient_attn.measure.accuracy import measure_case

    case = Case(**request["case"])
    return line(measure_case(case, **{name: request[name] for name in ("target", "seconds", "inputs")}))


def _load(request: Mapping[str, Any]) -> str:
    """Error message if the backend does not exist, else None."""
    try:
        _resolved(request["target"])
    except AttentionError as error:
        return json.dumps(str(error))
    return json.dumps(None)


def _check(request: Mapping[str, Any]) -> str:
    """Run one check of a backend; returns the fields of its record."""
    from efficient_attn import testing

    target, name, declared = request["target"], request["check"], request["declared"]
    spec = _resolved(target) if declared is None else testing.adapt(target, **declared)
    (record,) = testing.check(
        spec, on_fail="collect", seed=request["seed"], only=[name], long=request["long"]
    )
    return json.dumps(asdict(record))


def _kernel(request: Mapping[str, Any]) -> str:
    """Check one fused kernel, by its name or at an address, with one tile."""
    from efficient_attn.external import is_address, object_at
    from efficient_attn.measure.kernel_check import check_kernel

    name = request["kernel"]
    kernel = object_at(name, role="a kernel")[1] if is_address(name) else name
    return json.dumps(check_kernel(kernel, **{x: request[x] for x in ("precision", "device", "tile")}))


@cache
def _resolved(target: str) -> Any:
    from efficient_attn.backends import resolve

    return resolve(target)
