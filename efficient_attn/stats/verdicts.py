"""Verdicts on the claims of papers: the vocabulary of all reproductions, and its rules."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from efficient_attn.runner.records import Record
from efficient_attn.stats.rounds import call_time, time_ratio

HOLDS = "holds"
FAILS = "does not hold"
NOT_MEASURABLE = "not measurable here"


class Finding(NamedTuple):
    """A claim and its measurement.

    Attributes:
        claim: Claim of the paper, with its place.
        measured: The measurement, in numbers.
        verdict: One of the verdicts above, or `turns round when …`; a colon and details may follow.
    """

    claim: str
    measured: str
    verdict: str


def turns_round(when: str) -> str:
    """Verdict that the opposite of the claim holds under a condition."""
    return f"turns round when {when}"


def proportional(costs: Sequence[float], orders: Sequence[float], *, within: float = 0.01) -> bool:
    """Whether costs are proportional to the orders of a table, within a relative tolerance."""
    shares = [cost / order for cost, order in zip(costs, orders, strict=True)]
    return bool(shares) and max(shares) <= (1 + within) * min(shares)


def cost(record: Record) -> float:
    """The time or the peak bytes of a record."""
    return call_time(record).median if record.times_s else float(record.peak_bytes or 0)


def costs_less(record: Record, other: Record) -> bool | None:
    """Whether a record's time or memory is below the other's; None if not significant."""
    if record.times_s and other.times_s:
        ratio = time_ratio(record, other)
        return True if ratio.side_of_one == 1 else False if (ratio.high or math.inf) <= 1 else None
    # Bytes have no noise.
    return cost(record) < cost(other)


def of_all(answers: Mapping[str, bool | None]) -> str:
    """Verdict on a statement from its answers by place; None is an answer within the noise."""
    wrong = [place for place, answer in answers.items() if answer is False]
    unclear = [place for place, answer in answers.items() if answer is None]
    if not answers or len(unclear) == len(answers):
        return NOT_MEASURABLE
    if len(wrong) == len(answers):
        return FAILS
    if wrong:
        return turns_round("; ".join(wrong))
    return f"{HOLDS}; too noisy to tell at {'; '.join(unclear)}" if unclear else HOLDS


def span(values: Sequence[float]) -> str:
    """`1.2 to 3.4`, the minimum and the maximum; one number if they print alike."""
    if not values:
        return "unknown"
    low, high = (f"{edge:.2g}" if edge < 100 else f"{edge:.0f}" for edge in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def not_measured(records: Sequence[Record]) -> tuple[str, ...]:
    """One line per kind and status of records without numbers: their count, and the first with its reason."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.status != "ok":
            groups.setdefault((record.case.kind, record.status), []).append(record)
    return tuple(
        f"{kind}: {len(failed)} points {status}, the first of them {failed[0].case.label} at "
        f"{failed[0].case.tokens} tokens: {failed[0].reason}"
        for (kind, status), failed in groups.items()
    )
