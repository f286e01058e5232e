"""The child process that runs backends: requests in, answers out, over a pipe.

Its stdout, which belongs to the backends, is redirected to stderr. The process ends, with all its children,
as soon as the parent is gone.
"""

import faulthandler
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from efficient_attn.contained import contained, described
from efficient_attn.errors import AttentionError
from efficient_attn.measure.process import READY
from efficient_attn.measure.record import Case
from efficient_attn.measure.records import line

# Address space that threads and libraries reserve without using it; excluded from the limit.
_RESERVED_BYTES = 1 << 30

# The parent kills late children; if it is gone and C code hangs, the child ends itself this much later.
_GRACE_S, _LONGEST_S = 5.0, 1e6

# Size of a trial call.
_TOKENS, _HEADS, _HEAD_DIM = 16, 2, 8


def main(requests: int, answers: int, limit_bytes: int | None = None) -> None:
    """Serve requests from a pipe, for ever; both pipes by their descriptors."""
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
        pipe.send_bytes(_answer(received.get()).encode())


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


def _answer(request: dict[str, Any]) -> str:
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
    """Error message if the backend does not exist, else None; exceptions of a trial call do not count."""
    try:
        spec = _resolved(request["target"])
    except AttentionError as error:
        return json.dumps(str(error))
    if request["rehearse"]:
        _rehearse(spec)
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
    arguments = {name: request[name] for name in ("precision", "device", "tile")}
    return json.dumps(check_kernel(kernel, **arguments))


@cache
def _resolved(target: str) -> Any:
    from efficient_attn.backends import resolve

    return resolve(target)


def _rehearse(spec: Any) -> None:
    """Build and call the backend once, to find hangs and crashes before it runs in the user's process."""
    import torch

    from efficient_attn.backends import build

    try:
        with contained(), torch.no_grad():
            backend = build(spec, head_dim=_HEAD_DIM, num_heads=_HEADS, max_tokens=_TOKENS).eval()
            backend(*torch.randn(3, 1, _HEADS, _TOKENS, _HEAD_DIM))
    except Exception as error:
        # The study will meet and record the same exception.
        described(error)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
