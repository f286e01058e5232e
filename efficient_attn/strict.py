"""Strict JSON: every number is finite, every name is unique, and a value is of its field's type."""

import json
import math
import re
import sys
from collections import Counter
from typing import Any

from efficient_attn.errors import DataError

# Without these a number has fewer than 200 digits and an exponent below 100.
_MAY_OVERFLOW = re.compile(r"[eE]\+?[0-9]{3}"), re.compile(r"(?<![0-9])[0-9]{200}")


def read_object(text: bytes | str, place: str) -> dict[str, Any]:
    """The JSON object that a text is; messages call where it stands `place`.

    Raises:
        DataError: If it is something else, or holds a number that is not finite or a name twice.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        # Looking at every number costs more than reading them all.
        parse_float = _finite_number if any(one.search(text) for one in _MAY_OVERFLOW) else None
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=parse_float, object_pairs_hook=_object
        )
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is no strict JSON: {str(error)[:80]}.") from None
    if not isinstance(value, dict):
        raise DataError(f"{place} is no JSON object.")
    return value


def fits(value: Any, wanted: str, least: int, most: int) -> bool:
    """Whether a value read from JSON is of a field's type; a number is never negative.

    Args:
        least: Smallest whole number of a field of whole numbers; `most` the largest.
    """
    if value is None:
        return "None" in wanted
    if "Mapping" in wanted:
        return isinstance(value, dict) and not any(isinstance(item, (dict, list)) for item in value.values())
    if "tuple" in wanted:
        if not isinstance(value, list):
            return False
        if "int" in wanted:
            return _all_fit(value, {int}, least, most)
        return _all_fit([item for item in value if item is not None], {int, float}, 0, sys.float_info.max)
    if "float" in wanted:
        return _all_fit([value], {int, float}, 0, sys.float_info.max)
    if "bool" in wanted or "str" in wanted:
        return isinstance(value, bool if "bool" in wanted else str)
    return _all_fit([value], {int}, least, most)


def finite(value: Any) -> bool:
    """Whether no number in a value is infinite or no number at all."""
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def without_infinities(value: Any) -> Any:
    """The value with None in the place of every number that is not finite."""
    if isinstance(value, dict):
        return {name: without_infinities(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [without_infinities(item) for item in value]
    return value if finite(value) else None


def _all_fit(values: list[Any], types: set[type], least: float, most: float) -> bool:
    # Types are compared, since a bool is an int to `isinstance`. Samples are many: no Python runs for each.
    if not values:
        return True
    return set(map(type, values)) <= types and least <= min(values) and max(values) <= most


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Readers of JSON differ in which of two values they take.
    value = dict(pairs)
    if len(value) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twice[:40]!r} stands twice in one object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite_number(text: str) -> float:
    # "1e999" is valid JSON and reads as infinity.
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number
