"""Findings of a benchmark, in a few sentences computed from its records."""

from collections.abc import Sequence

from efficient_attn.runner.records import Record
from efficient_attn.runner.units import show_bytes
from efficient_attn.stats.curves import YARDSTICK, Curve, by_subject, curves
from efficient_attn.stats.noise_warnings import COULD_NOT_TELL, IDLE, disturbance
from efficient_attn.studies.bench.break_even import pay_sentences
from efficient_attn.studies.bench.heads import head_sentences
from efficient_attn.studies.bench.versions import version_sentences
from efficient_attn.studies.view import Environment


def sentences(records: Sequence[Record], environment: Environment | None = None) -> list[str]:
    """Growth of time and memory, break-even lengths, memory, cost of heads, and the verdict on versions.

    Args:
        environment: Environment of the run: times measured under a load support no verdict.
    """
    told = []
    load = disturbance([], environment)
    for subject, group in by_subject(records).items():
        times, peaks = curves(group, "time_s"), curves(group, "peak_bytes")
        place = "" if subject == "attention" else f"Of the {subject}: "
        for sentence in (_growth_sentence(times if load is None else (), peaks), _memory_sentence(peaks)):
            if sentence is not None:
                told.append(place + (sentence[0].lower() + sentence[1:] if place else sentence))
    versions = version_sentences(records, environment)
    if load is not None and not versions and any(record.case.kind == "time" for record in records):
        first = COULD_NOT_TELL[0].upper() + COULD_NOT_TELL[1:]
        return [*told, f"{first} how times grow and from where a backend pays: {load}; {IDLE}."]
    pays = [] if load is not None else pay_sentences(records, environment or {})
    return [*told, *pays, *([] if load is not None else head_sentences(records)), *versions]


def _growth_sentence(times: Sequence[Curve], peaks: Sequence[Curve]) -> str | None:
    """The powers of tokens that the growing parts of time and of memory follow."""
    both = (("time", _powers(times)), ("memory", _powers(peaks)))
    told = [f"{name} grows as {powers}" for name, powers in both if powers]
    if not told:
        return None
    return f"Fixed costs aside, {'; '.join(told)}."


def _powers(all_curves: Sequence[Curve]) -> str:
    """`n^1.0 (window, linformer [0.9 to 1.1]), n^2.0 (exact)`, and for which it is unclear; empty if for all.

    An interval stands where it does not round to the power.
    """
    groups: dict[float, list[str]] = {}
    unclear = []
    for curve in all_curves:
        fit = curve.growth
        if fit is None or not fit.clear:
            unclear.append(curve.label)
            continue
        low, high = (f"{fit.power if edge is None else edge:.1f}" for edge in (fit.low, fit.high))
        label = curve.label if low == high else f"{curve.label} [{low} to {high}]"
        groups.setdefault(round(fit.power, 1), []).append(label)
    if not groups:
        return ""
    told = [f"n^{power} ({', '.join(labels)})" for power, labels in sorted(groups.items())]
    return ", ".join(told) + (f", unclear for {', '.join(unclear)}" if unclear else "")


def _memory_sentence(peaks: Sequence[Curve]) -> str | None:
    """The smallest and the largest peak at the longest length of the only curve of exact attention."""
    exact = [curve for curve in peaks if curve.backend == YARDSTICK]
    if len(exact) != 1 or not exact[0].measured:
        return None
    tokens = exact[0].measured[-1].tokens
    costs = [(point.value, curve.label) for curve in peaks if (point := curve.at(tokens)) and point.value]
    if len(costs) < 2:
        return None
    (least, least_label), (most, most_label) = min(costs), max(costs)
    return (
        f"At {tokens} tokens a call takes from {show_bytes(least)} ({least_label}) to {show_bytes(most)} "
        f"({most_label}) beside its inputs."
    )
