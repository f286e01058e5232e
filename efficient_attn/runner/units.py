"""Parsing and formatting of lengths, durations and memory limits."""

import re
from collections.abc import Sequence

from efficient_attn.errors import OptionError

_MOST_POINTS = 1000
_MOST_TOKENS = 1 << 30
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
_BYTES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_sizes(text: str | int | Sequence[int], *, name: str) -> tuple[int, ...]:
    """Whole numbers in rising order from `256,512`, `256:4096:x2`, `256:1024:256`, `1k`, or from numbers.

    Raises:
        OptionError: If the text has none of these forms; the message names the argument.
    """
    if isinstance(text, str):
        sizes = [size for part in text.split(",") for size in _range(part, name=name, text=text)]
    else:
        sizes = list(_numbers(text, name=name))
    if len(sizes) > _MOST_POINTS:
        raise OptionError(f"{name} {text} asks for {len(sizes)} sizes; at most {_MOST_POINTS} are measured.")
    return tuple(sorted(set(sizes)))


def parse_seconds(text: str | float, *, name: str) -> float:
    """Seconds from `90`, `90s`, `2m` or `1h`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(text).strip().lower())
    if found is None or float(found[1]) == 0:
        raise OptionError(f"{name} is a duration such as 90s, 2m or 1h, not {text!r}.")
    return float(found[1]) * _SECONDS[found[2]]


def parse_bytes(text: str | int, *, name: str, available: int | None) -> int | None:
    """Bytes from `8GiB`, `500M` or a share of the available memory such as `70%`; None if that is unknown."""
    value = str(text).strip().lower()
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", value)
    if share is not None and 0 < float(share[1]) <= 100:
        return None if available is None else int(available * float(share[1]) / 100)
    amount = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", value)
    if share is not None or amount is None or float(amount[1]) == 0:
        raise OptionError(f"{name} is an amount such as 8GiB or a share such as 70%, not {text!r}.")
    return int(float(amount[1]) * _BYTES[amount[2]])


def show_bytes(amount: float) -> str:
    """Format bytes with the most readable unit: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} TiB"


def show_seconds(amount: float) -> str:
    """Format a duration with the most readable unit: `1.5 ms`."""
    for unit, factor in (("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if amount >= factor:
            return f"{amount / factor:.3g} {unit}"
    return f"{amount * 1e9:.3g} ns"


def show(amount: float, unit: str) -> str:
    """Format an amount of a quantity: bytes and seconds with the most readable unit, others as they are."""
    if unit == "s":
        return show_seconds(amount)
    return show_bytes(int(amount)) if unit == "bytes" else f"{amount:.3g}"


def _numbers(values: int | Sequence[int], *, name: str) -> Sequence[int]:
    numbers = [values] if isinstance(values, int) else list(values)
    wrong = [number for number in numbers if not _is_size(number)]
    if wrong or not numbers:
        shown = wrong[0] if wrong else numbers
        raise OptionError(f"{name} takes whole numbers from 1 to {_MOST_TOKENS}, not {shown!r}.")
    return numbers


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_TOKENS


def _range(part: str, *, name: str, text: str) -> list[int]:
    pieces = part.strip().split(":")
    if len(pieces) == 1:
        return [_size(pieces[0], name=name, text=text)]
    if len(pieces) != 3:
        raise _nonsense(name, text)
    first, last = (_size(piece, name=name, text=text) for piece in pieces[:2])
    if last < first:
        raise OptionError(f"{name} {text} ends before it begins; write {last}:{first}:{pieces[2]}.")
    times = pieces[2].startswith("x")
    step = _size(pieces[2].removeprefix("x"), name=name, text=text)
    if times and step < 2:
        raise OptionError(f"{name} {text} never grows; a factor is at least x2.")
    sizes: list[int] = []
    while first <= last and len(sizes) <= _MOST_POINTS:
        sizes.append(first)
        first = first * step if times else first + step
    return sizes


def _size(piece: str, *, name: str, text: str) -> int:
    found = re.fullmatch(r"(\d{1,12})(k?)", piece.strip().lower())
    size = int(found[1]) * (1024 if found[2] else 1) if found else 0
    if not 1 <= size <= _MOST_TOKENS:
        raise _nonsense(name, text)
    return size


def _nonsense(name: str, text: str) -> OptionError:
    return OptionError(
        f"{name} cannot be {text!r}. Write 256,512 or 256:4096:x2 (from, to, factor) or 1k (1024); "
        f"sizes are from 1 to {_MOST_TOKENS}."
    )
