"""Containment of external code: every exception that it raises becomes an ordinary error."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from traceback import walk_tb

from efficient_attn.errors import AttentionError, DataError

# Maximum length of a message of external code, as one line.
_LONGEST = 300

# Packages and folders whose frames are no code of the user.
_LIBRARIES = {__name__.partition(".")[0], "torch", *sys.stdlib_module_names}
_INSTALLED = {"site-packages", "dist-packages"}


class LeftError(Exception):
    """External code raised SystemExit or another exception that ends a program."""


@contextmanager
def contained() -> Iterator[None]:
    """Convert an exception that would end the program, but for Ctrl-C, to a LeftError."""
    try:
        yield
    except (Exception, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise LeftError(described(error)) from error


@contextmanager
def running(name: str, failure: str = "fails") -> Iterator[None]:
    """Run external code with its stdout redirected to stderr. Errors of this package pass through.

    Raises:
        DataError: If the code raises any other exception; the message begins with name and failure.
    """
    try:
        # stdout holds results only.
        with contained(), redirect_stdout(sys.stderr):
            yield
    except AttentionError:
        raise
    except Exception as error:  # any exception of external code becomes one line
        raise DataError(f"{name} {failure}: {described(error).rstrip('.')}.") from error


def described(error: BaseException) -> str:
    """`Type: text (own.py, line 12)` of an error as one line."""
    if isinstance(error, LeftError):
        return str(error)
    try:
        with contained():
            text = str(error)
    except Exception:  # str() of an external exception runs external code
        text = ""
    place = _place(error)
    return one_line(f"{type(error).__name__}: {text}")[: _LONGEST - len(place)].rstrip(": ") + place


def _place(error: BaseException) -> str:
    """Last place in the code of the user, ` (own.py, line 12)`, or nothing."""
    place = ""
    for frame, line in walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if path.suffix == ".py" and package not in _LIBRARIES and not _INSTALLED & {*path.parts}:
            place = f" ({one_line(path.name)[:100]}, line {line})"
    return place


def one_line(text: str) -> str:
    """The beginning of a text as one line."""
    # A text of megabytes is cut before it is split.
    return " ".join(text[: 10 * _LONGEST].split())[:_LONGEST]
