"""Two versions of one backend, timed in the same interleaved rounds: their ratio and a verdict.

A round holds calls of both versions within a moment of each other, so the ratio is taken per round, and a
round is one sample. The interval holds within the run.
"""

from collections.abc import Sequence
from typing import NamedTuple

from efficient_attn.report.table import Table, show_range, show_spread, three_digits
from efficient_attn.runner.records import Record
from efficient_attn.stats.curves import Point, curves
from efficient_attn.stats.noise_warnings import COULD_NOT_TELL, IDLE, explanation
from efficient_attn.stats.rounds import FEWEST_ROUNDS, Typical, time_ratio
from efficient_attn.studies.bench.plan import AGAINST
from efficient_attn.studies.view import Environment

FASTER, SLOWER, NO_DIFFERENCE = "faster", "slower", "no difference that this run can see"

# Half-width of an interval that holds 1 and is too wide to exclude a difference that matters.
_WIDE = 0.1

_MILLISECOND = 1e-3


class _Compared(NamedTuple):
    """One version against another at one length; `remedy` of a verdict that the times do not support."""

    own: Point
    its: Point
    ratio: Typical
    verdict: str
    remedy: str = ""

    @property
    def shown(self) -> str:
        ratio = f"{three_digits(self.ratio.median)}x"
        if self.ratio.low is None or self.ratio.high is None:
            return ratio
        return f"{ratio} ({show_range(self.ratio.low, self.ratio.high)})"


def version_tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """One table per version: times of both, their ratio and the verdict at every length."""
    note = (
        "In brackets the 95 % interval of the median over rounds of the ratio, within this run; at least "
        f"{FEWEST_ROUNDS} rounds are needed (--rounds)."
    )
    return [
        Table(
            f"{label} against {against}",
            ("tokens", f"{label}, ms", f"{against}, ms", f"speed, {against} = 1", "verdict"),
            tuple(
                (str(one.own.tokens), _time(one.own), _time(one.its), one.shown, one.verdict) for one in found
            ),
            (note,),
        )
        for (label, against), found in _versions(records, environment).items()
    ]


def version_sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The verdict on every version, lengths with the same verdict together."""
    sentences = []
    for (label, against), found in _versions(records, environment).items():
        groups: dict[str, list[str]] = {}
        for one in found:
            groups.setdefault(f"{one.verdict}{one.remedy}", []).append(f"{one.shown} at {one.own.tokens}")
        verdicts = "; ".join(f"{verdict}: {', '.join(shown)} tokens" for verdict, shown in groups.items())
        sentences.append(f"{label} against {against}: {verdicts}.")
    return sentences


def _versions(records: Sequence[Record], environment: Environment) -> dict[tuple[str, str], list[_Compared]]:
    """{(version, other version): comparisons by length}; empty if the run compared no versions."""
    times, against, found = curves(records, "time_s"), environment.get(AGAINST), {}
    for curve in times:
        others = [
            one
            for one in times
            if one.points[0].record.case.label == against and one.setting == curve.setting
        ]
        if len(others) == 1 and others[0] is not curve:
            pairs = [(own, its) for own in curve.measured if (its := others[0].at(own.tokens)) is not None]
            found[curve.label, others[0].label] = [_compared(*pair, environment) for pair in pairs]
    return {labels: compared for labels, compared in found.items() if compared}


def _compared(own: Point, its: Point, environment: Environment) -> _Compared:
    ratio = time_ratio(own.record, its.record)
    load = explanation(own.record, its.record, ratio.median, environment)
    if load is not None:
        return _Compared(own, its, ratio, COULD_NOT_TELL, f" ({load}; {IDLE})")
    more = "more --rounds would settle it"
    if ratio.low is None or ratio.high is None:
        return _Compared(own, its, ratio, COULD_NOT_TELL, f" (fewer than {FEWEST_ROUNDS} rounds; {more})")
    if ratio.side_of_one:
        return _Compared(own, its, ratio, FASTER if ratio.side_of_one == 1 else SLOWER)
    if max(ratio.high / ratio.median, ratio.median / ratio.low) > 1 + _WIDE:
        wide = f" (intervals reach more than {_WIDE:.0%}; {more})"
        return _Compared(own, its, ratio, COULD_NOT_TELL, wide)
    return _Compared(own, its, ratio, NO_DIFFERENCE)


def _time(point: Point) -> str:
    return show_spread(point.value or 0.0, point.low, point.high, unit=_MILLISECOND)
