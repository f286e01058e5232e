"""Signals that end a command: the first keeps the measured records, the second ends at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Ends:
    """Exit code of the signal that ended the command; None if there was none."""

    def __init__(self) -> None:
        self.code: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Interrupt the run, which keeps its records; a second signal ends the process."""
        if self.code is not None:
            os._exit(self.code)
        self.code = 128 + number
        raise KeyboardInterrupt


@contextmanager
def polite() -> Iterator[Ends]:
    """Treat a request to end (SIGTERM) like Ctrl-C while the block runs."""
    ends = Ends()
    # Python allows only the main thread to set signal handlers.
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    before: dict[int, Any] = {number: signal.signal(number, ends.handle) for number in numbers}
    try:
        yield ends
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
