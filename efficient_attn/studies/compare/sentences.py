"""The verdict of a comparison in one sentence, and the candidates that save no operations."""

from collections.abc import Iterable, Sequence

from efficient_attn.report.error_table import describe
from efficient_attn.report.notes import setting
from efficient_attn.runner.layers import single_names
from efficient_attn.runner.records import Record
from efficient_attn.stats.candidates import missing, not_measured, operations_sentence
from efficient_attn.stats.noise_warnings import COULD_NOT_TELL, IDLE, disturbance
from efficient_attn.studies.compare.analysis import (
    Comparison,
    Contender,
    asked_error,
    comparisons,
    nearest,
)
from efficient_attn.studies.compare.tables import show_row_error, show_speed
from efficient_attn.studies.view import Environment


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """For each comparison the verdict, and which candidates save no operations."""
    found = []
    for one in comparisons(records):
        found += [_sentence(one, environment), operations_sentence(one.records)]
    return [sentence for sentence in found if sentence is not None]


def _sentence(one: Comparison, environment: Environment) -> str:
    case, max_error = one.case, asked_error(environment)
    place = f"On this machine ({setting(case)}) at {case.tokens} tokens ({describe(case.inputs)})"
    exact, share = one.exact, f"{100 * max_error:g} %"
    if exact is None:
        return f"{place} exact attention was not measured, so nothing can be compared with it."
    everywhere = " on every layer" if len(single_names(case.inputs)) > 1 else ""
    verdict = one.verdict(max_error)
    load = disturbance([row.timed for row in (exact, *verdict.near) if row.timed], environment)
    finished = {row.label for row in one.contenders if row.failed or (row.error and row.timed)}
    left = not_measured(environment, finished)
    nothing = "nothing measured so far" if left else "nothing"
    both = f"both within {share} of exact{everywhere} and faster"
    if not verdict.near:
        text = f"{nothing} but exact is within {share} of it{everywhere}, whatever the times"
        text += f"; nearest: {_names([nearest(one.candidates)])}" if one.candidates else ""
    elif load is not None:
        text = f"it is open: {COULD_NOT_TELL} whether anything is {both}: {load}; {IDLE}. "
        text += f"Within {share}, which no load changes: {_names(verdict.near)}"
    elif verdict.both:
        text = f"{both}: {_names(verdict.both, exact)}"
    elif verdict.alike:
        text = f"it is unclear whether anything is {both}: the times of "
        text += f"{', '.join(row.label for row in verdict.alike)} and exact overlap; more --rounds "
        text += "would settle it"
    else:
        answer = "" if left else ", so exact is the answer"
        text = (
            f"{nothing} is {both}{answer}; nearest of the faster backends: {_names([verdict.fast], exact)}; "
        )
        text += f"of the backends within {share}: {_names(verdict.near[:1], exact)}"
    return f"{place} {text}.{missing(left, environment)}"


def _names(rows: Iterable[Contender | None], exact: Contender | None = None) -> str:
    """`window (error 0.3, 2.50x as fast)`; without exact attention the error alone."""
    texts = []
    for row in filter(None, rows):
        speed = f", {show_speed(row, exact)} as fast" if exact is not None else ""
        texts.append(f"{row.label} (error {show_row_error(row)}{speed})")
    return ", ".join(texts) or "nothing"
