"""The process that runs backends: a request a line in, an answer a line out, over two pipes of their own.

Its stdout belongs to the backends, and is where stderr is. It ends, with all that it started, as soon as
nobody is left to ask.
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

from efficient_attn.sweep import jobs

READY = "ready"

# Threads and libraries reserve addresses that they never fill; so many are not held against a backend.
_RESERVED_BYTES = 1 << 30

# The asker ends what is late; if it is gone and Python hangs in C, the process ends itself this much later.
_GRACE_S, _LONGEST_S = 5.0, 1e6


def main(requests: int, answers: int, limit_bytes: int | None = None) -> None:
    """Answer requests from one file descriptor to the other, for ever.

    Args:
        limit_bytes: Memory that may be allocated on the CPU once torch is loaded.
    """
    # No terminal interrupts it: a backend that sends itself the signal ends nothing.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Before torch is loaded, so that an asker who leaves at once leaves nothing behind.
    received: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, received), daemon=True).start()
    # Loaded before the first request: it takes longer than most measurements. Torch comes with it.
    from efficient_attn.sweep import calls  # noqa: F401  (loading is part of starting, not of the first point)

    if limit_bytes is not None:
        _limit_memory(limit_bytes)
    _send(answers, READY)
    while True:
        _send(answers, _answer(received.get()))


def _limit_memory(limit_bytes: int) -> None:
    """Refuse allocations beyond the limit, where the system says how much is taken already."""
    import resource

    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return
    most = pages * resource.getpagesize() + limit_bytes + _RESERVED_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


def _answer(request: dict[str, Any]) -> str:
    with open(os.devnull, "wb") as nowhere:
        # Of what Python offers this alone needs no lock that a hanging call may hold.
        end_s = min(request["limit_s"] + _GRACE_S, _LONGEST_S)
        faulthandler.dump_traceback_later(end_s, exit=True, file=nowhere)
        try:
            return jobs.answer(request)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _receive(requests: int, received: "queue.SimpleQueue[dict[str, Any]]") -> None:
    """Pass requests on; a thread of its own notices the end of the asker during a measurement too."""
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
