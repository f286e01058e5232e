"""Strict JSON: every number is finite, a row is flat, and a value is what its field says."""

import json
import math
import re
import sys
from typing import Any

from efficient_attn.errors import DataError

# A whole number fits into 64 bits, and every number into a float.
_LARGEST = 2**63 - 1

# Without these a number has fewer than 200 digits and an exponent below 100.
_MAY_OVERFLOW = re.compile(r"[eE]\+?[0-9]{3}|[0-9]{200}")


def read_object(text: bytes | str, place: str) -> dict[str, Any]:
    """The JSON object that a text is; messages call where it stands `place`.

    Raises:
        DataError: If it is something else, or holds a number that is not finite.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        # Looking at every number costs more than reading them all.
        parse_float = _finite_number if _MAY_OVERFLOW.search(text) else None
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=parse_float)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is no strict JSON: {str(error)[:80]}.") from None
    if not isinstance(value, dict):
        raise DataError(f"{place} is no JSON object.")
    return value


def fits(value: Any, wanted: str) -> bool:
    """Whether a value read from JSON is of a field's type; what was counted or measured is never negative."""
    if value is None:
        return "None" in wanted
    if "Mapping" in wanted:
        return isinstance(value, dict) and not any(isinstance(item, (dict, list)) for item in value.values())
    if "tuple" in wanted:
        return isinstance(value, list) and all(item is None or _is_number(item) for item in value)
    if "float" in wanted:
        return _is_number(value)
    if "bool" in wanted or "str" in wanted:
        return isinstance(value, bool if "bool" in wanted else str)
    return isinstance(value, int) and _is_number(value) and value <= _LARGEST


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


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite_number(text: str) -> float:
    # "1e999" is valid JSON and reads as infinity.
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number
