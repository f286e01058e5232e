"""The command line: which commands there are, and what becomes of errors."""

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import typer

from efficient_attn.errors import AttentionError
from efficient_attn.studies import studies

from . import exits, talk
from .command import command_of
from .ends import polite

# Whatever is wrong with the command line itself; Typer exports only its subclass.
_UsageError: Any = typer.BadParameter.__bases__[0]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Compare efficient attention with exact attention: what it costs and how wrong it is.",
)

# The order of the help text. A command is a study, or a module beside this file that holds a function of that
# name, or name_command; studies that are not listed follow.
COMMANDS = (
    "list",
    "compare",
    "show",
    "bench",
    "mse",
    "recall",
    "diff",
    "report",
    "train",
    "reproduce",
    "capture",
    "swap",
    "check",
    "env",
)


def _register(name: str) -> None:
    if name in studies():
        app.command(name)(command_of(studies()[name]))
        return
    module = import_module(f".{name}", __package__)
    parser = getattr(module, "CommandClass", None)
    app.command(name, cls=parser)(getattr(module, f"{name}_command", None) or getattr(module, name))


for _name in dict.fromkeys((*COMMANDS, *studies())):
    _register(_name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with the exit code that says how it went."""
    if arguments is None:
        sys.excepthook = talk.fault
    with polite() as ends:
        try:
            code = _run(arguments)
        except BrokenPipeError:
            code = _unread()
        except SystemExit as leaving:
            # Typer leaves in this way where nobody reads any more.
            if not isinstance(leaving.__context__, BrokenPipeError):
                raise
            code = _unread()
        sys.exit(ends.code or code or exits.DONE)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        return int(app(args=arguments, standalone_mode=False) or exits.DONE)
    except AttentionError as error:
        fail(str(error))
    except _UsageError as error:
        fail(error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        return exits.INTERRUPTED


def _unread() -> int:
    """The exit code where whoever read our output has left; nothing more is written, not even at exit."""
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return 128 + signal.SIGPIPE


def fail(message: str) -> NoReturn:
    """One line that says what was wrong with the request, and exit code 2."""
    talk.refuse(message)
    sys.exit(exits.WRONG_REQUEST)
