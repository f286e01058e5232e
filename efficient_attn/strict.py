"""Strict JSON: every number is finite and every name is unique."""

import json
import math
from collections import Counter
from typing import Any

from efficient_attn.errors import DataError


def read_object(text: bytes | str, place: str) -> dict[str, Any]:
    """The JSON object that a text is; messages call where it stands `place`.

    Raises:
        DataError: If it is something else, or holds a number that is not finite or a name twice.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite_number, object_pairs_hook=_object
        )
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is no strict JSON: {str(error)[:80]}.") from None
    if not isinstance(value, dict):
        raise DataError(f"{place} is no JSON object.")
    return value


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
