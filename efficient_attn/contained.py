"""Containment of external code: every exception that it raises becomes an ordinary error."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import FrameType
from typing import Any

from efficient_attn.errors import AttentionError, DataError, UnsupportedError

# Maximum length of a message of external code, as one line.
_LONGEST = 300

_ENDS = (signal.SIGINT, signal.SIGTERM)


class LeftError(Exception):
    """External code raised SystemExit, KeyboardInterrupt or another exception that ends a program."""


@contextmanager
def contained() -> Iterator[None]:
    """Convert a SystemExit or KeyboardInterrupt raised by the block itself to an ordinary error.

    Signals such as Ctrl-C and SIGTERM pass through.

    Raises:
        LeftError: In place of an exception that would end the program.
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


@contextmanager
def trial() -> Iterator[None]:
    """Build a backend to check its options: a value that never works is the only error that passes.

    An unsupported request and errors of external code are results, recorded where they are measured.
    """
    try:
        with contained():
            yield
    except UnsupportedError:
        return
    except AttentionError:
        raise
    except Exception:
        return


def described(error: BaseException) -> str:
    """`Type: text` as one line; the text is omitted if it cannot be computed."""
    if isinstance(error, LeftError):
        return str(error)
    try:
        with contained():
            text = str(error)
    except Exception:  # str() of an external exception runs external code
        text = ""
    return one_line(f"{type(error).__name__}: {text}").rstrip(": ")


def one_line(text: str) -> str:
    """The beginning of a text as one line."""
    # A text of megabytes is cut before it is split.
    return " ".join(text[: 10 * _LONGEST].split())[:_LONGEST]


@contextmanager
def importing(place: str) -> Iterator[None]:
    """Run the import of external code, with its stdout redirected to stderr: stdout holds results only.

    Raises:
        DataError: If the import raises any exception; the message names the file or package.
    """
    with _one_data_error(f"{place} cannot be imported"):
        yield


@contextmanager
def running(name: str) -> Iterator[None]:
    """Run external code with its stdout redirected to stderr; errors of this package pass through.

    Raises:
        DataError: If the code raises any other exception; the message begins with the name.
    """
    with _one_data_error(f"{name} fails", passing=(AttentionError,)):
        yield


@contextmanager
def _one_data_error(problem: str, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    try:
        with contained(), redirect_stdout(sys.stderr):
            yield
    except passing:
        raise
    except Exception as error:  # any exception of external code becomes one line
        raise DataError(f"{problem}: {described(error).rstrip('.')}.") from error


@contextmanager
def _noting(came: list[int]) -> Iterator[None]:
    """Record the signals that arrive while the block runs, and handle them as before."""
    # Python handles signals in the main thread only; other threads are never interrupted.
    main = threading.current_thread() is threading.main_thread()
    before: dict[int, Any] = {number: signal.getsignal(number) for number in _ENDS} if main else {}
    handlers = {number: handler for number, handler in before.items() if callable(handler)}

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
