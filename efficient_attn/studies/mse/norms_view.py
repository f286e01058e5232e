"""Features of fixed norm, which have a bias, beside unbiased ones."""

import json
from collections.abc import Sequence
from typing import Any

from efficient_attn.measure.record import Record
from efficient_attn.report import text


def sentences(shown: Sequence[Any]) -> list[str]:
    """Inputs on which fixed norms have the smaller error, and sizes from which others have it."""
    nearer: dict[str, list[str]] = {}
    later: dict[str, list[str]] = {}
    for panel in shown:
        unbiased = {_without_norms(x.record): x.value for x in panel.points if not _has_fixed_norms(x.record)}
        for label, curve in panel.curves.items():
            twins = [(unbiased.get(_without_norms(x.record)), x) for x in curve if _has_fixed_norms(x.record)]
            pairs = [(point.size, value < point.value) for value, point in twins if value is not None]
            inputs = text.describe(panel.inputs)
            last = max((number for number, (_, is_nearer) in enumerate(pairs) if not is_nearer), default=-1)
            if last + 1 < len(pairs):
                later.setdefault(label, []).append(f"from {pairs[last + 1][0]} features on {inputs}")
            elif pairs:
                nearer.setdefault(label, []).append(f"{inputs} (up to {pairs[-1][0]})")
    return [
        *[f"{label} errs less than norms=chi on {'; '.join(x)}." for label, x in nearer.items()],
        *[f"norms=chi errs less than {label} {'; '.join(x)}." for label, x in later.items()],
    ]


def _has_fixed_norms(record: Record) -> bool:
    return record.case.options.get("norms") == "fixed"


def _without_norms(record: Record) -> str:
    """Backend and options but the norms of random directions."""
    options = {name: value for name, value in record.case.options.items() if name != "norms"}
    return json.dumps([record.case.backend, options], sort_keys=True)
