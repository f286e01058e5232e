"""Two versions of one backend, timed in the same interleaved rounds: their ratio and a verdict.

A round holds calls of both versions within a moment of each other, so the ratio is taken per round, and a
round is one sample. The interval allows each version a shift from run to run, as of every time.
"""

from collections.abc import Sequence

from efficient_attn.report.table import show_ratio
from efficient_attn.runner.records import Case, Record
from efficient_attn.runner.variants import execution_label
from efficient_attn.stats.curves import TIME, Curve, by_clock, curves
from efficient_attn.stats.noise_warnings import COULD_NOT_TELL, IDLE, explanation
from efficient_attn.stats.rounds import FEWEST_ROUNDS, Typical, time_ratio
from efficient_attn.studies.bench.crossover import common_points
from efficient_attn.studies.bench.plan import AGAINST
from efficient_attn.studies.view import Environment

FASTER, SLOWER, NO_DIFFERENCE = "faster", "slower", "no difference that this run can see"

# Half-width of an interval that holds 1 and is too wide to exclude a difference that matters.
_WIDE = 0.1

_ROUNDS = "more --rounds would settle it"


def version_sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The verdict on every version, lengths with the same verdict together; none without versions."""
    return [
        sentence if clock == TIME else f"By {clock}: {sentence}"
        for clock, timed in by_clock(records).items()
        for sentence in _verdicts(curves(timed, "time_s"), environment)
    ]


def _verdicts(times: Sequence[Curve], environment: Environment) -> list[str]:
    """One sentence on every pair of versions in one execution."""
    against, sentences = environment.get(AGAINST), []
    cases = {curve: curve.points[0].record.case for curve in times}
    others = [curve for curve, case in cases.items() if _version(case) == against]
    for curve, other in ((curve, other) for other in others for curve in times if curve is not other):
        groups: dict[str, list[str]] = {}
        for own, its in common_points(curve, other) if curve.setting == other.setting else ():
            ratio = time_ratio(own.record, its.record)
            load = explanation(own.record, its.record, ratio.median, environment)
            verdict = _verdict(ratio) if load is None else f"{COULD_NOT_TELL} ({load}; {IDLE})"
            groups.setdefault(verdict, []).append(f"{show_ratio(ratio)} at {own.tokens}")
        verdicts = "; ".join(f"{verdict}: {', '.join(shown)} tokens" for verdict, shown in groups.items())
        if verdicts:
            sentences.append(f"{curve.label} against {other.label}, speed of {other.label} = 1: {verdicts}.")
    return sentences


def _version(case: Case) -> str:
    """Label of the version without its execution."""
    return case.label.removesuffix(execution_label("", case.execution))


def _verdict(ratio: Typical) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{COULD_NOT_TELL} (fewer than {FEWEST_ROUNDS} rounds; {_ROUNDS})"
    if ratio.side_of_one:
        return FASTER if ratio.side_of_one == 1 else SLOWER
    if max(ratio.high / ratio.median, ratio.median / ratio.low) > 1 + _WIDE:
        return f"{COULD_NOT_TELL} (intervals reach more than {_WIDE:.0%}; {_ROUNDS})"
    return NO_DIFFERENCE
