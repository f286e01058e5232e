"""A plan: a flat TOML file in which every flag of a command is a key.

Flags of the command line take precedence, and every run writes the plan that repeats it.
"""

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from efficient_attn.errors import DataError, OptionError, UnknownNameError
from efficient_attn.limits import PLAN_BYTES, read_bytes

# The destination and display of a run are no part of its measurement.
_NOT_REPEATED = ("out", "resume", "force-resume", "dry-run", "json")


def take_up(context: typer.Context, path: Path | None) -> Path | None:
    """Make the keys of a plan the defaults of the command that is about to run."""
    if path is None:
        return None
    flags = _flags(context)
    defaults = {}
    for key, value in _read(path).items():
        if key not in flags:
            raise UnknownNameError(f"key of {path}", key, flags)
        defaults[flags[key].name] = _checked(context, flags[key], value, place=f"{path}: {key}")
    context.default_map = defaults
    return path


PlanOption = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="FILE.toml",
        help="Read flags from a file, one key each; flags of the command line take precedence.",
        is_eager=True,
        callback=take_up,
    ),
]


def as_plan(context: typer.Context, made: Any) -> str:
    """The plan file that repeats the running command, of which `made` is the plan."""
    from efficient_attn.integrations.called import is_called

    # Options that the machine may have decided; a model from a file has its own dtype and device.
    settled = {name: getattr(one.case, name) for one in made.points[:1] for name in ("dtype", "threads")}
    settled |= {"device": made.device}
    if is_called(context.params.get("model")):
        settled = {name: value for name, value in settled.items() if name == "threads"}
    chosen = {
        key: settled.get(flag.name, context.params.get(flag.name)) for key, flag in _flags(context).items()
    }
    lines = [
        f"{key} = {_toml(value)}\n"
        for key, value in chosen.items()
        if key not in _NOT_REPEATED and value not in (None, [], ())
    ]
    return f"# efficient-attn {context.info_name} --plan plan.toml\n{''.join(lines)}"


def _flags(context: typer.Context) -> dict[str, Any]:
    """The flags of the command by the key that each is in a plan."""
    named = {max(parameter.opts, key=len): parameter for parameter in context.command.params}
    keys = {
        name.removeprefix("--"): flag
        for name, flag in named.items()
        if name.startswith("--") or flag.param_type_name == "argument"
    }
    return {key: flag for key, flag in keys.items() if key not in ("plan", "help")}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_bytes(path, PLAN_BYTES).decode("utf-8"))
    except OSError as error:
        raise DataError(f"--plan: cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"--plan: {path} is no TOML: {error}.") from None


def _checked(context: typer.Context, flag: Any, value: Any, *, place: str) -> Any:
    """The value in the form of the command line; the message of an error names its key."""
    if getattr(flag, "is_flag", False):
        if not isinstance(value, bool):
            raise OptionError(f"{place} is true or false, not {value!r}.")
        return value
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, (str, int, float)) and not isinstance(item, bool) for item in items):
        raise OptionError(f"{place} is text, a number or a list of them, not {value!r}.")
    words = list(map(str, items))
    given = words if getattr(flag, "multiple", False) else ",".join(words)
    try:
        flag.process_value(context, given)
    except typer.BadParameter as error:
        raise OptionError(f"{place} cannot be {value!r}: {error.message}") from None
    return given


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, int):
        return str(value)
    # A string of JSON is one of TOML, but for one control character that JSON leaves as it is.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
