"""Parsing and formatting of names, lengths, durations and memory limits."""

import re
from collections.abc import Sequence

from efficient_attn.errors import OptionError

_MOST_POINTS = 1000
_MOST_TOKENS = 1 << 30
_RANGE = re.compile(r"(\d{1,12}k?)(?::(\d{1,12}k?):x(\d{1,12}))?")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
_BYTES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_sizes(text: str | int | Sequence[int], *, name: str) -> tuple[int, ...]:
    """Parse `256,512`, `256:4096:x2`, `1k` or numbers to whole numbers in rising order."""
    wrong = OptionError(
        f"{name} cannot be {text!r}. Write 256,512 or 256:4096:x2 (from, to, factor) or 1k (1024); "
        f"at most {_MOST_POINTS} sizes, from 1 to {_MOST_TOKENS}."
    )
    sizes = [text] if isinstance(text, int) else [] if isinstance(text, str) else list(text)
    for part in text.split(",") if isinstance(text, str) else ():
        bounds = _RANGE.fullmatch(part.strip().lower())
        if bounds is None:
            raise wrong
        ends, factor = (bounds[1], bounds[2] or bounds[1]), int(bounds[3] or 2)
        size, last = (int(end.removesuffix("k")) * (1024 if end.endswith("k") else 1) for end in ends)
        if size > last or factor < 2:
            raise wrong
        while size <= last and len(sizes) <= _MOST_POINTS:
            sizes.append(size)
            size *= factor
    valid = all(type(size) is int and 0 < size <= _MOST_TOKENS for size in sizes)
    if not valid or not 0 < len(sizes) <= _MOST_POINTS:
        raise wrong
    return tuple(sorted(set(sizes)))


def parse_names(texts: Sequence[str] | None, *, name: str) -> list[str] | None:
    """The names in `a,b` and in repeated flags, or None without texts."""
    if not texts:
        return None
    names = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    if not names:
        # An empty variable of a script ends here. It must not mean all backends.
        raise OptionError(f"{name} {texts[0]!r} names nothing; write a,b for several names, or leave it out.")
    return names


def parse_seconds(text: str | float, *, name: str) -> float:
    """Seconds from `90`, `90s`, `2m` or `1h`."""
    amount = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(text).strip().lower())
    if amount is None or float(amount[1]) == 0:
        raise OptionError(f"{name} is a duration such as 90s, 2m or 1h, not {text!r}.")
    return float(amount[1]) * _SECONDS[amount[2]]


def parse_bytes(text: str | int, *, name: str, available: int | None) -> int | None:
    """Bytes from `8GiB`, `500M` or a share such as `70%` of the available memory, or None if unknown."""
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
    power = next((power for power in range(4) if amount < 1000 * 1024**power), 4)
    return f"{amount / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def show_seconds(amount: float) -> str:
    """Format a duration with the most readable unit: `1.5 ms`."""
    units = {"min": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
    unit = next((unit for unit, least in units.items() if amount >= least), "ns")
    return f"{amount / units[unit]:.3g} {unit}"


def show(amount: float, unit: str) -> str:
    """Format an amount of a quantity: bytes and seconds with the most readable unit, others as they are."""
    if unit == "s":
        return show_seconds(amount)
    return show_bytes(int(amount)) if unit == "bytes" else f"{amount:.3g}"
