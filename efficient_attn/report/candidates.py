"""Texts on candidates that were not measured, or that save no operations."""

from collections.abc import Mapping, Sequence
from typing import Any

from efficient_attn.runner.records import Record
from efficient_attn.stats.candidates import candidates, saves_little

# Names of candidates that were not measured, before the rest is only counted.
_MOST_NAMES = 12


def missing(labels: Sequence[str], environment: Mapping[str, Any] | None) -> str:
    """` Not measured (2 of 5 candidates): window, linformer.`; empty if nothing is missing."""
    if not labels:
        return ""
    more = f" and {len(labels) - _MOST_NAMES} more" if len(labels) > _MOST_NAMES else ""
    names = f"{', '.join(labels[:_MOST_NAMES])}{more}"
    return f" Not measured ({len(labels)} of {len(candidates(environment))} candidates): {names}."


def operations_sentence(records: Sequence[Record]) -> str | None:
    """Which approximations save few operations or none at the length measured."""
    found = saves_little(records)
    if not found:
        return None
    names = ", ".join(f"{label} ({share:.2f}x)" for label, share in found.items())
    return (
        f"Operations, exact attention = 1, of what saves few or none at {records[0].case.tokens} tokens: "
        f"{names}."
    )
