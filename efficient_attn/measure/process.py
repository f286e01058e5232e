"""The end of a child process that answers requests, until a backend crashes or blocks it."""

import faulthandler
import json
import os
import queue
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from efficient_attn.errors import AttentionError
from efficient_attn.measure.record import Case, line

# First message of a process that has loaded everything.
READY = b"ready"

# Address space that threads and libraries reserve without using it; excluded from the limit.
_RESERVED_BYTES = 1 << 30

# The parent kills late children; if it is gone and C code hangs, the child ends itself this much later.
_GRACE_S, _LONGEST_S = 5.0, 1e6


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
    """Refuse allocations beyond the limit, if the system reports current usage."""
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
