"""Fields of options classes, and checks of options."""

from collections.abc import Callable, Iterable
from dataclasses import field, fields
from functools import partial
from typing import Any

from efficient_attn.errors import DtypeError, OptionError, UnknownNameError
from efficient_attn.limits import WHOLE_NUMBER

# Name of the option that seeds random backends.
SEED = "seed"
# A range in an external file must not fill the memory.
_MOST_NUMBERED = (1 << 16) - 1


def option(
    default: Any,
    help: str,
    *,
    added: bool = False,
    flag: str | None = None,
    alias: str | None = None,
    metavar: str | None = None,
    parse: Callable[..., Any] | None = None,
    least: float | None = None,
    most: float | None = None,
    several: bool = False,
    argument: bool = False,
    rare: bool = False,
    free: bool = False,
) -> Any:
    """Field of an options class, with its default and one line of help, the standard term first.

    All but the first three arguments are of studies, whose fields become options of a command.

    Args:
        added: Whether records exist that were written before the option: at its default a case leaves it
            out, so that it equals the cases of these.
        flag: Flag of the command line; None: the field's name with hyphens. `alias` is a second flag.
        metavar: Form of the value in the help text.
        parse: Value from text: `parse(text, name=flag)`; None: the annotated type decides.
        least: Smallest number; `most` is the largest.
        several: The flag may be repeated; `parse` gets the list of texts.
        argument: A positional argument in place of a flag.
        rare: Shown by --help-all alone.
        free: A resumed run may have another value.
    """
    declared = locals()
    return field(default=declared.pop("default"), metadata=declared)


compute_dtype_option = partial(
    option,
    None,
    "Dtype that q, k and v are cast to: bfloat16 or float16. The output has q's dtype.",
    added=True,
)


def check_compute_dtype(value: object) -> None:
    """Refuse a dtype of the arithmetic other than half precision."""
    if value is not None:
        one_of("compute_dtype", value, ("bfloat16", "float16"))


def recorded(options: Any) -> dict[str, Any]:
    """Options by name, as stored in cases and checkpoints."""
    return {
        item.name: value
        for item in fields(options)
        if (value := getattr(options, item.name)) != item.default or not item.metadata.get("added")
    }


def one_of(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a value outside the choices."""
    names = list(choices)
    if value not in names:
        raise UnknownNameError(f"choice of {name}", str(value), names)


def numbers_in_ranges(text: Any, *, what: str) -> list[int]:
    """Numbers of a text such as "0-5,8", ascending. Errors call them `what`."""
    numbers: list[int] = []
    for part in str(text).split(","):
        first, _, last = part.strip().partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal()) or not int(first) <= int(last) <= _MOST_NUMBERED:
            raise OptionError(f"{what} are named by numbers and ranges, such as '0-5,8', not {text!r}.")
        numbers += range(int(first), int(last) + 1)
    return sorted(numbers)


def probability(name: str, value: object) -> None:
    """Refuse anything but a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DtypeError(f"{name} is a number, not {value!r}.")
    if not 0 <= value < 1:
        raise OptionError(f"{name} is at least 0 and below 1, not {value}.")


def whole_number(name: str, value: object, *, least: int = 0, most: int = WHOLE_NUMBER) -> None:
    """Refuse anything but a whole number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise DtypeError(f"{name} is a whole number, not {value!r}.")
    if not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        raise OptionError(f"{name} is {bound}, not {value}.")


def positive_number(name: str, value: float) -> float:
    """Return the value, or refuse anything but a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DtypeError(f"{name} is a number, not {value!r}.")
    if not 0 < value < float("inf"):
        raise OptionError(f"{name} is a finite number above 0, not {value}.")
    return value
