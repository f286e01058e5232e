"""Findings of a benchmark, in a few sentences with the numbers of its tables."""

import math
from collections.abc import Sequence

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import CEILING, YARDSTICK
from efficient_attn.report.text import setting, show_ratio
from efficient_attn.stats.curves import TIME, Curve, by_clock, by_subject, curves
from efficient_attn.stats.noise_warnings import COULD_NOT_TELL, IDLE, explanation
from efficient_attn.studies.bench.crossover import gains
from efficient_attn.studies.bench.tables import crossover_cells
from efficient_attn.studies.view import Environment


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """Speed and the length from which each backend pays."""
    found = []
    for subject, group in by_subject(records).items():
        place = "" if subject == "attention" else f" of the {subject}"
        for clock, timed in by_clock(group).items():
            where = place if clock == TIME else f"{place} by {clock}"
            found += pay_sentences(where, curves(timed, "time_s"), environment)
    return found


def pay_sentences(place: str, times: Sequence[Curve], environment: Environment) -> list[str]:
    """Speeds and crossovers, one sentence per setting; or the load that leaves them open."""
    starts = crossover_cells(times)
    known: dict[str, list[str]] = {}
    unknown: dict[str, list[str]] = {}
    for gain in gains(times):
        own = gain.records[0].case
        # A file may hold times whose ratio no float can hold.
        if own.backend == CEILING or not 0 < gain.ratio.median < math.inf:
            continue
        if (load := explanation(*gain.records, gain.ratio.median, environment)) is not None:
            unknown.setdefault(load, []).append(gain.label)
            continue
        start = f", faster from: {starts[gain.label]}" if gain.label in starts else ""
        text = f"{gain.label} {show_ratio(gain.ratio)} at {gain.tokens} tokens{start}"
        known.setdefault(setting(own), []).append(text)
    return [
        f"Speed{place}, {YARDSTICK} = 1, on this machine ({where}): {'; '.join(texts)}."
        for where, texts in known.items()
    ] + [
        f"{COULD_NOT_TELL.capitalize()} the speed{place} of {', '.join(labels)}: {load}; {IDLE}."
        for load, labels in unknown.items()
    ]
