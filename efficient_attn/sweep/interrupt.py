"""An interruption waits while something is written down, and ends the run right after."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held() -> Iterator[None]:
    """Let Ctrl-C and a request to end wait until the block is done: a row is written whole, once."""
    # Python handles signals in the main thread only; elsewhere nothing can interrupt.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in _ENDS}
    try:
        for ending in _ENDS:
            signal.signal(ending, lambda number, frame: waiting.append((number, frame)))
        yield
    finally:
        for changed, handler in handlers.items():
            signal.signal(changed, handler or signal.SIG_DFL)
    for came, frame in waiting[:1]:
        if callable(handlers[came]):
            handlers[came](came, frame)
        else:
            os.kill(os.getpid(), came)
