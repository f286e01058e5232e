"""Deferred interruption: a signal during a write takes effect right after it."""

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
    """Defer SIGINT and SIGTERM until the block is done, so that a row is written whole, exactly once."""
    # Python handles signals in the main thread only; other threads are never interrupted.
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
