"""The child process that runs backends: one request per line in, one answer per line out, over two pipes.

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
from pathlib import Path
from typing import Any

from efficient_attn.measure import jobs
from efficient_attn.measure.process import READY

# Address space that threads and libraries reserve without using it; excluded from the limit.
_RESERVED_BYTES = 1 << 30

# The parent kills late children; if it is gone and C code hangs, the child ends itself this much later.
_GRACE_S, _LONGEST_S = 5.0, 1e6


def main(requests: int, answers: int, limit_bytes: int | None = None) -> None:
    """Serve requests from one file descriptor to the other, for ever."""
    # Ctrl-C is ignored, so that a backend that sends itself SIGINT has no effect.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Started before torch is loaded, so that a parent that exits at once leaves no child behind.
    received: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, received), daemon=True).start()
    # torch is loaded before the first request, since it takes longer than most measurements.
    from efficient_attn.measure import calls  # noqa: F401  (part of the start-up, not of the first point)

    if limit_bytes is not None:
        _limit_memory(limit_bytes)
    _send(answers, READY)
    while True:
        _send(answers, _answer(received.get()))


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
            return jobs.answer(request)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _receive(requests: int, received: "queue.SimpleQueue[dict[str, Any]]") -> None:
    """Queue requests; runs in a thread of its own, which notices the end of the parent at any time."""
    with os.fdopen(requests, encoding="utf-8") as lines:
        for text in lines:
            received.put(json.loads(text))
    os.killpg(os.getpid(), signal.SIGKILL)


def _send(answers: int, text: str) -> None:
    data = f"{text}\n".encode()
    while data:
        data = data[os.write(answers, data) :]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
