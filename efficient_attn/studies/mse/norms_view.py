"""Features of fixed norm, which have a bias, beside unbiased ones."""

import json
from collections.abc import Sequence
from typing import Any

from efficient_attn.measure.record import Record
from efficient_attn.report import text


def sentences(shown: Sequence[Any]) -> list[str]:
    """Size from which norms of Gaussian vectors have a smaller error than fixed norms, input by input."""
    places: dict[str, list[str]] = {}
    for panel in shown:
        unbiased = {_without_norms(x.record): x.value for x in panel.points if not _has_fixed_norms(x.record)}
        for label, curve in panel.curves.items():
            twins = {_without_norms(point.record): point for point in curve if _has_fixed_norms(point.record)}
            pairs = [(point.size, unbiased[x] < point.value) for x, point in twins.items() if x in unbiased]
            if not pairs:
                continue
            last = max((number for number, (_, nearer) in enumerate(pairs) if not nearer), default=-1)
            place = f"beyond {pairs[-1][0]}" if last + 1 == len(pairs) else f"from {pairs[last + 1][0]}"
            places.setdefault(label, []).append(f"{place} features on {text.describe(panel.inputs)}")
    return [f"norms=chi is nearer than {label} {'; '.join(x)}." for label, x in places.items()]


def _has_fixed_norms(record: Record) -> bool:
    return record.case.options.get("norms") == "fixed"


def _without_norms(record: Record) -> str:
    """Backend and options but the norms of random directions."""
    options = {name: value for name, value in record.case.options.items() if name != "norms"}
    return json.dumps([record.case.backend, options], sort_keys=True)
