"""Two versions of one backend, timed in the same interleaved rounds: their ratio and a verdict.

A round holds calls of both versions within a moment of each other, so the ratio is taken per round, and a
round is one sample. The interval holds within the run.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from efficient_attn.report.table import Table, show_range, show_spread, three_digits
from efficient_attn.runner.records import Record
from efficient_attn.stats.curves import Curve, Point, by_subject, curves
from efficient_attn.stats.noise_warnings import COULD_NOT_TELL, IDLE, explanation
from efficient_attn.stats.rounds import FEWEST_ROUNDS, Typical, time_ratio
from efficient_attn.studies.bench.plan import AGAINST

FASTER, SLOWER, NO_DIFFERENCE = "faster", "slower", "no difference that this run can see"

# Half-width of an interval that holds 1 and is too wide to exclude a difference that matters.
_WIDE = 0.1

_MILLISECOND = 1e-3


class _Compared(NamedTuple):
    """One version against another at one length.

    Attributes:
        ratio: Speed-up over the other version.
        verdict: Verdict with its remedy if the times support none.
    """

    own: Point
    its: Point
    ratio: Typical
    verdict: str


def version_tables(records: Sequence[Record], environment: Mapping[str, Any] | None) -> list[Table]:
    """One table per version and subject: times of both, their ratio and the verdict at every length."""
    made = []
    for (subject, label, against), found in _versions(records, environment).items():
        place = "" if subject == "attention" else f" of the {subject}"
        rows = tuple(
            (
                str(one.own.tokens),
                _time(one.own),
                _time(one.its),
                f"{three_digits(one.ratio.median)}x{_interval(one.ratio)}",
                one.verdict.partition(":")[0],
            )
            for one in found
        )
        made.append(
            Table(
                f"{label} against {against}{place}",
                ("tokens", f"{label}, ms", f"{against}, ms", f"speed, {against} = 1", "verdict"),
                rows,
                (
                    "In brackets the 95 % interval of the median over rounds of the ratio, within this run; "
                    f"at least {FEWEST_ROUNDS} rounds are needed (--rounds).",
                ),
            )
        )
    return made


def version_sentences(records: Sequence[Record], environment: Mapping[str, Any] | None) -> list[str]:
    """The verdict on every version, lengths with the same verdict together."""
    told = []
    for (subject, label, against), found in _versions(records, environment).items():
        groups: dict[str, list[_Compared]] = {}
        for one in found:
            groups.setdefault(one.verdict, []).append(one)
        place = "" if subject == "attention" else f" in the {subject}"
        verdicts = "; ".join(_say(verdict, group) for verdict, group in groups.items())
        told.append(f"{label} against {against}{place}: {verdicts}.")
    return told


def _say(verdict: str, group: Sequence[_Compared]) -> str:
    if verdict.startswith(COULD_NOT_TELL):
        return f"at {', '.join(str(one.own.tokens) for one in group)} tokens {verdict}"
    ratios = ", ".join(
        f"{three_digits(one.ratio.median)}x{_interval(one.ratio)} at {one.own.tokens}" for one in group
    )
    return f"{verdict}: {ratios} tokens"


def _versions(
    records: Sequence[Record], environment: Mapping[str, Any] | None
) -> dict[tuple[str, str, str], list[_Compared]]:
    """{(subject, version, other version): comparisons by length}; empty if the run compared no versions."""
    against = (environment or {}).get(AGAINST)
    if not isinstance(against, str):
        return {}
    found = {}
    for subject, group in by_subject(records).items():
        times = curves(group, "time_s")
        for curve in times:
            other = _other(curve, times, against)
            if other is not None and (both := _compared(curve, other, environment)):
                found[subject, curve.label, other.label] = both
    return found


def _other(curve: Curve, times: Sequence[Curve], against: str) -> Curve | None:
    """The curve of the other version in the same setting."""
    same = [one for one in times if _label(one) == against and one.setting == curve.setting]
    return same[0] if len(same) == 1 and same[0] is not curve else None


def _label(curve: Curve) -> str:
    return curve.points[0].record.case.label


def _compared(own: Curve, its: Curve, environment: Mapping[str, Any] | None) -> list[_Compared]:
    found = []
    for point in own.measured:
        other = its.at(point.tokens)
        if other is not None:
            ratio = time_ratio(point.record, other.record)
            load = explanation(point.record, other.record, ratio.median, environment)
            found.append(_Compared(point, other, ratio, _verdict(ratio, load)))
    return found


def _verdict(ratio: Typical, load: str | None) -> str:
    if load is not None:
        return f"{COULD_NOT_TELL}: {load}; {IDLE}"
    if ratio.low is None or ratio.high is None:
        return f"{COULD_NOT_TELL}: fewer than {FEWEST_ROUNDS} rounds; more --rounds would settle it"
    if ratio.side_of_one:
        return FASTER if ratio.side_of_one == 1 else SLOWER
    if max(ratio.high / ratio.median, ratio.median / ratio.low) > 1 + _WIDE:
        return f"{COULD_NOT_TELL}: intervals reach more than {_WIDE:.0%}; more --rounds would settle it"
    return NO_DIFFERENCE


def _interval(ratio: Typical) -> str:
    return "" if ratio.low is None or ratio.high is None else f" ({show_range(ratio.low, ratio.high)})"


def _time(point: Point) -> str:
    return show_spread(point.value or 0.0, point.low, point.high, unit=_MILLISECOND)
