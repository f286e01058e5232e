"""The process that measures: a request a line in, an answer a line out, over two pipes of their own.

Its stdout belongs to the backends, and is where stderr is. It ends, with all that it started, as soon as
nobody is left to ask.
"""

import json
import os
import queue
import signal
import sys
import threading
from typing import Any

from efficient_attn.sweep import worker
from efficient_attn.sweep.records import Case, line

READY, INTERRUPTED = "ready", "interrupted"


def main(requests: int, answers: int) -> None:
    """Answer requests from one file descriptor to the other, for ever."""
    # Loaded before the first request: it takes longer than most measurements.
    import torch  # noqa: F401  (loading it is part of starting, not of the first point)

    received: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, received), daemon=True).start()
    _send(answers, READY)
    while True:
        _send(answers, _answer(received.get()))


def _answer(request: dict[str, Any]) -> str:
    case = Case(**request["case"])
    try:
        return line(worker.measure(case, target=request["target"], seconds=request["seconds"]))
    except KeyboardInterrupt:
        return INTERRUPTED


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
