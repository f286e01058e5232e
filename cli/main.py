"""The command line: its commands, signals that end them, and the exit codes of errors."""

import inspect
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from efficient_attn.errors import AttentionError
from efficient_attn.runs.registry import studies

from . import DONE, INTERRUPTED, SOME_NOT_MEASURED, WRONG_REQUEST, console
from .command import command_of

# Errors of the command line itself; Typer exports only a subclass.
_UsageError: Any = typer.BadParameter.__bases__[0]

# Flags for the last word of an unknown option; the first flag that the command has is suggested.
_ELSEWHERE = {**dict.fromkeys(("features", "rank", "window"), ("--size", "--set")), "text": ("--inputs",)}

# Help texts use this many columns of a terminal.
_WIDE = {"max_content_width": 100}

# The order of the help text. A command is a study, or a function `name` or `name_command` in the module of
# that name in this folder; studies that are not listed follow.
GROUPS = {
    "Measure": ("bench", "mse", "recall", "show"),
    "Models": ("advise", "swap"),
    "Your attention": ("check", "gpu-check"),
    "Results": ("report", "diff", "list", "env"),
}
COMMANDS = tuple(name for names in GROUPS.values() for name in names)


class _Grouped(TyperGroup):
    """The commands in groups, each with the first sentence of its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        further = tuple(name for name in self.commands if name not in COMMANDS)
        width = formatter.width - max(map(len, self.commands)) - 6
        for title, names in {**GROUPS, "Further studies": further}.items():
            rows = [(name, self.commands[name].get_short_help_str(width)) for name in names]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


app = typer.Typer(
    cls=_Grouped,
    context_settings=_WIDE,
    rich_markup_mode=None,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Compare efficient attention with exact attention: time, memory and error.",
)


@app.callback(invoke_without_command=True)
def _options_of_all(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        import efficient_attn

        console.put(f"efficient-attn {efficient_attn.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        for line in context.get_help().splitlines():
            console.put(line)


def _register(name: str) -> None:
    if name in studies():
        command = command_of(studies()[name])
        app.command(name, help=_help(command), context_settings={"allow_extra_args": True, **_WIDE})(command)
        return
    function = name.replace("-", "_")
    module = import_module(f".{function}", __package__)
    command = getattr(module, f"{function}_command", None) or getattr(module, function)
    app.command(name, help=_help(command), context_settings=_WIDE)(command)


def _help(command: Callable[..., Any]) -> str:
    """The docstring of a command, with the example on a line of its own that is not wrapped."""
    return (inspect.getdoc(command) or "").replace("Example: ", "\b\nExample:\n  ")


for _name in dict.fromkeys((*COMMANDS, *studies())):
    _register(_name)


@contextmanager
def polite() -> Iterator[list[int]]:
    """Treat a request to end (SIGTERM) like Ctrl-C, and collect exit codes of signals.

    A signal interrupts the run, which keeps its records; a second one ends the process.
    """
    codes: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if codes:
            os._exit(codes[0])
        codes.append(128 + number)
        raise KeyboardInterrupt

    # Python allows only the main thread to set signal handlers.
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    before: dict[int, Any] = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield codes
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _message(error: Any) -> str:
    """Message of an error of the command line. An unknown option has the flag that takes its value."""
    if type(error).__name__ == "NoSuchOption":
        flags = {flag for parameter in error.ctx.command.params for flag in parameter.opts}
        word = re.split("[-_]", error.option_name)[-1]
        near = [flag for flag in _ELSEWHERE.get(word, ()) if flag in flags]
        error.possibilities = near[:1] or error.possibilities
    return str(error.format_message())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the code of its outcome."""
    code = DONE
    with polite() as codes:
        try:
            code = int(app(args=arguments, standalone_mode=False) or DONE)
        except (AttentionError, _UsageError) as error:
            console.refuse(str(error) if isinstance(error, AttentionError) else _message(error))
            code = WRONG_REQUEST
        except OSError as error:
            # Results that cannot be printed; without stderr the code alone says so.
            with suppress(OSError):
                console.refuse(f"Cannot write {error.filename or 'the output'}: {error.strerror or error}.")
            code = SOME_NOT_MEASURED
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        sys.exit(next(iter(codes), code))
