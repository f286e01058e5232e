"""What became of a paper's claim: the words that every reproduction uses, and the rules behind them."""

from collections.abc import Sequence
from typing import NamedTuple

from efficient_attn.analysis.fits import Growth
from efficient_attn.sweep.records import Record

HOLDS = "holds"
ONLY_AGAINST_DENSE = "holds only against dense softmax"
FAILS = "does not hold"
NOT_MEASURABLE = "not measurable here"


class Finding(NamedTuple):
    """A claim beside what was found.

    Attributes:
        claim: What the paper says, and where.
        measured: What was found, in numbers.
        verdict: One of the words above, or `turns round when …`; a colon and details may follow.
    """

    claim: str
    measured: str
    verdict: str


def turns_round(when: str) -> str:
    """The opposite of the claim was found under a condition."""
    return f"turns round when {when}"


def proportional(costs: Sequence[float], orders: Sequence[float], *, within: float = 0.01) -> bool:
    """Whether costs are one multiple of the orders that a table prints, up to a share of it."""
    shares = [cost / order for cost, order in zip(costs, orders, strict=True)]
    return bool(shares) and max(shares) <= (1 + within) * min(shares)


def agrees(power: float, fit: Growth | None) -> bool | None:
    """Whether a measured growth can be of this power; None where its interval tells too little."""
    if fit is None or not fit.clear or fit.low is None or fit.high is None:
        return None
    return fit.low <= power <= fit.high


def against_both(dense: bool | None, fused: bool | None) -> str:
    """The verdict on a claim of being faster or smaller than softmax attention.

    Args:
        dense: Whether it is true against the formula written out, which papers before 2022 compared with;
            None if that could not be measured.
        fused: Whether it is true against the fused kernel.
    """
    if dense is None and fused is None:
        return NOT_MEASURABLE
    if dense is False or (dense is None and fused is False):
        return FAILS
    return ONLY_AGAINST_DENSE if fused is False else HOLDS


def not_measured(records: Sequence[Record]) -> tuple[str, ...]:
    """One line for each status and number of tokens that has no numbers: who, and the first reason."""
    groups: dict[tuple[str, int, str], list[Record]] = {}
    for record in records:
        if record.status != "ok":
            key = (record.status, record.case.tokens, record.case.kind)
            groups.setdefault(key, []).append(record)
    return tuple(
        f"{tokens} tokens, {kind}, {status}: {', '.join(record.case.label for record in failed)}: "
        f"{failed[0].reason}"
        for (status, tokens, kind), failed in sorted(groups.items())
    )
