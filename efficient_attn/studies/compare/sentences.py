"""The verdict of a comparison in one sentence, and the candidates that save no operations."""

from collections.abc import Sequence

from efficient_attn.report.candidates import missing, operations_sentence
from efficient_attn.report.error_table import describe
from efficient_attn.runner.layers import single_names
from efficient_attn.runner.records import Record
from efficient_attn.stats.candidates import not_measured
from efficient_attn.stats.noise_warnings import COULD_NOT_TELL, IDLE, disturbance
from efficient_attn.studies.compare.analysis import Comparison, Contender
from efficient_attn.studies.compare.grouping import comparisons
from efficient_attn.studies.compare.tables import setting, show_row_error, show_speed
from efficient_attn.studies.view import Environment


def comparison_sentences(
    records: Sequence[Record], max_error: float, environment: Environment | None = None
) -> list[str]:
    """For each comparison the verdict, and which candidates save no operations.

    Args:
        environment: Environment of the run: its noise warnings and candidates limit the verdict.
    """
    told = []
    for one in comparisons(records):
        told += [_sentence(one, max_error, environment), operations_sentence(one.records)]
    return [sentence for sentence in told if sentence is not None]


def _sentence(one: Comparison, max_error: float, environment: Environment | None) -> str:
    place = f"On this machine ({setting(one)}) at {one.case.tokens} tokens ({describe(one.case.inputs)})"
    exact, share = one.exact, f"{100 * max_error:g} %"
    if exact is None:
        return f"{place} exact attention was not measured, so nothing can be compared with it."
    verdict = one.verdict(max_error)
    load = disturbance([row.timed for row in (exact, *verdict.near) if row.timed], environment)
    left = not_measured(environment, one.finished)
    nothing = "nothing measured so far" if left else "nothing"
    both = f"both within {share} of exact{_everywhere(one)} and faster"
    if not verdict.near:
        told = f"{nothing} but exact is within {share} of it{_everywhere(one)}, whatever the times"
        told += "" if one.nearest is None else f"; nearest: {_wrong(one.nearest)}"
    elif load is not None:
        near = ", ".join(_wrong(row) for row in verdict.near)
        told = f"it is open: {COULD_NOT_TELL} whether anything is {both}: {load}; {IDLE}. "
        told += f"Within {share}, which no load changes: {near}"
    elif verdict.both:
        told = f"{both}: {', '.join(_told(row, exact) for row in verdict.both)}{_alike(verdict.alike)}"
    elif verdict.alike:
        names = ", ".join(row.label for row in verdict.alike)
        told = f"it is unclear whether anything is {both}: the times of {names} overlap those of exact; "
        told += "more --rounds would settle it"
    else:
        answer = "" if left else ", so exact is the answer"
        told = f"{nothing} is {both}{answer}; nearest among what is faster: {_told(verdict.fast, exact)}; "
        told += f"among what is within {share}: {_told(verdict.accurate, exact)}"
    if verdict.partly and load is None:
        told += f"; within {share} on some of the layers only: "
        told += ", ".join(_told(row, exact) for row in verdict.partly)
    return f"{place} {told}.{missing(left, environment)}"


def _everywhere(one: Comparison) -> str:
    return " on every layer" if len(single_names(one.case.inputs)) > 1 else ""


def _wrong(row: Contender | None) -> str:
    return "nothing" if row is None else f"{row.label} (error {show_row_error(row)})"


def _told(row: Contender | None, exact: Contender) -> str:
    if row is None:
        return "nothing"
    return f"{row.label} (error {show_row_error(row)}, {show_speed(row, exact)} as fast)"


def _alike(rows: Sequence[Contender]) -> str:
    """Nearly exact backends whose times overlap with exact attention."""
    names = ", ".join(row.label for row in rows)
    return f"; the samples do not tell whether {names} is faster" if rows else ""
