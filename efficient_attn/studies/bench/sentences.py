"""Findings of a benchmark, in a few sentences with the numbers of its tables."""

import math
from collections.abc import Iterable, Sequence

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import CEILING, YARDSTICK, single_names
from efficient_attn.report.text import setting, show_ratio
from efficient_attn.stats.candidates import missing, operations_sentence
from efficient_attn.stats.curves import TIME, Curve, by_clock, by_subject, curves
from efficient_attn.studies.bench.comparison import (
    Comparison,
    Contender,
    by_setting,
    comparisons,
    error_limit,
    nearest,
)
from efficient_attn.studies.bench.crossover import gains
from efficient_attn.studies.bench.tables import crossover_cells, error_cell, inputs_words, many_lengths
from efficient_attn.studies.view import Environment, cost_cells


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The verdict at the longest length with errors, then speeds and lengths from which a backend pays."""
    groups = by_setting(comparisons(records))
    texts = []
    for group in groups:
        texts += [_verdict(group[-1], environment), operations_sentence(group[-1].records)]
    if many_lengths(records) or not groups:
        texts += _speeds(records)
    return [text for text in texts if text is not None]


def _speeds(records: Sequence[Record]) -> list[str]:
    texts = []
    for subject, group in by_subject(records).items():
        place = "" if subject == "attention" else f" of the {subject}"
        for clock, timed in by_clock(group).items():
            where = place if clock == TIME else f"{place} by {clock}"
            texts += pay_sentences(where, curves(timed, "time_s"))
    return texts


def pay_sentences(place: str, times: Sequence[Curve]) -> list[str]:
    """Speeds and crossovers, one sentence per setting."""
    starts = crossover_cells(times)
    speeds: dict[str, list[str]] = {}
    for gain in gains(times):
        case = gain.records[0].case
        # A file may hold times whose ratio no float can hold.
        if case.backend == CEILING or not 0 < gain.ratio.median < math.inf:
            continue
        start = f", faster from: {starts[gain.label]}" if gain.label in starts else ""
        text = f"{gain.label} {show_ratio(gain.ratio)} at {gain.tokens} tokens{start}"
        speeds.setdefault(setting(case), []).append(text)
    return [
        f"Speed{place}, {YARDSTICK} = 1, on this machine ({where}): {'; '.join(texts)}."
        for where, texts in speeds.items()
    ]


def _verdict(comparison: Comparison, environment: Environment) -> str:
    case, max_error = comparison.case, error_limit(environment)
    place = f"On this machine ({setting(case)}) at {case.tokens} tokens ({inputs_words(comparison)})"
    exact, share = comparison.exact, f"{100 * max_error:g} %"
    if exact is None:
        return f"{place} exact attention was not measured, so nothing can be compared with it."
    everywhere = " on every layer" if len(single_names(comparison.inputs)) > 1 else ""
    near = comparison.near(max_error)
    finished = {row.label for row in comparison.contenders if row.failed or (row.error and row.timed)}
    left = missing(environment, finished)
    nothing = "nothing measured so far" if left else "nothing"
    both = f"both within {share} of exact{everywhere} and faster"
    untimed = [row for row in comparison.candidates if not row.timed and row.worst <= max_error]
    if not near and untimed:
        text = f"it is open whether anything is {both}; not timed: {_names(untimed)}"
    elif not near:
        text = f"{nothing} but exact is within {share} of it{everywhere}, whatever the times"
        text += f"; nearest: {_names([nearest(comparison.candidates)])}" if comparison.candidates else ""
    elif faster := comparison.faster(near):
        text = f"{both}: {_names(faster, exact)}"
    elif alike := comparison.faster(near, side=0):
        names = ", ".join(row.label for row in alike)
        text = f"it is unclear whether anything is {both}: the times of {names} and exact overlap; more "
        text += "--rounds would settle it"
    else:
        answer = "" if left else ", so exact is the answer"
        fast = _names([nearest(comparison.faster(comparison.candidates))], exact)
        text = f"{nothing} is {both}{answer}; nearest of the faster backends: {fast}; "
        text += f"of the backends within {share}: {_names(near[:1], exact)}"
    return f"{place} {text}.{left}"


def _names(rows: Iterable[Contender | None], exact: Contender | None = None) -> str:
    """`window (error 0.3, 2.50x as fast)`; without exact attention the error alone."""
    texts = []
    for row in filter(None, rows):
        speed = f", {cost_cells(row.timed, exact.timed, None)[1]} as fast" if exact is not None else ""
        texts.append(f"{row.label} (error {error_cell(row)}{speed})")
    return ", ".join(texts) or "nothing"
