"""Code of somebody else, run so that it ends nothing but itself: all that it raises is an ordinary error."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import FrameType
from typing import Any

from efficient_attn.errors import DataError

# A message of somebody else's code becomes one line of at most this many characters.
_LONGEST = 300

_ENDS = (signal.SIGINT, signal.SIGTERM)


class LeftError(Exception):
    """The code tried to leave: SystemExit, KeyboardInterrupt or another exception that ends a program."""


@contextmanager
def contained() -> Iterator[None]:
    """Turn a SystemExit or KeyboardInterrupt that the block raises itself into an ordinary error.

    Ctrl-C, and a request to end the process, pass: a handler of their signals has run.

    Raises:
        LeftError: In the place of what would end the program.
    """
    came: list[int] = []
    with _noting(came):
        try:
            yield
        except (Exception, GeneratorExit):
            raise
        except BaseException as error:
            if came:
                raise
            raise LeftError(described(error)) from error


def described(error: BaseException) -> str:
    """`Type: text` as one line; a text that cannot be had is left out."""
    if isinstance(error, LeftError):
        return str(error)
    try:
        with contained():
            text = str(error)
    except Exception:  # The text of an error is code of whoever wrote it.
        text = ""
    return one_line(f"{type(error).__name__}: {text}").rstrip(": ")


def one_line(text: str) -> str:
    """The beginning of a text as one line."""
    # A text of megabytes is cut before it is taken apart.
    return " ".join(text[: 10 * _LONGEST].split())[:_LONGEST]


@contextmanager
def importing(place: str) -> Iterator[None]:
    """Run the code of a file or a package; what it prints is talk, for stdout holds results and nothing else.

    Raises:
        DataError: Where it raises anything; the message names the place.
    """
    try:
        with contained(), redirect_stdout(sys.stderr):
            yield
    except Exception as error:  # Whatever a stranger's file raises becomes one line.
        raise DataError(f"{place} cannot be imported: {described(error)}.") from error


@contextmanager
def _noting(came: list[int]) -> Iterator[None]:
    """List the signals that come while the block runs, and handle them as before."""
    # Python handles signals in the main thread only; elsewhere none interrupts.
    main = threading.current_thread() is threading.main_thread()
    found: dict[int, Any] = {number: signal.getsignal(number) for number in _ENDS} if main else {}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        handlers[number](number, frame)

    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
