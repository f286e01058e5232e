"""Tables of time and peak memory of every backend, with failures."""

from collections.abc import Mapping, Sequence

from efficient_attn.report.table import Table, show_growth, show_ratio, show_spread
from efficient_attn.runner.records import Record
from efficient_attn.stats.curves import YARDSTICK, Curve, Point, by_subject, curves
from efficient_attn.stats.rounds import FEWEST_ROUNDS, round_times
from efficient_attn.studies.bench.analysis import gains

# Lengths of one table; of more the shortest are left out and only the files hold them.
_MOST_LENGTHS = 8

_MILLISECOND, _MEBIBYTE = 1e-3, 2.0**20


def cost_tables(records: Sequence[Record]) -> list[Table]:
    """The tables of a benchmark: time, then peak memory, as far as they were measured."""
    made = []
    for subject, group in by_subject(records).items():
        place = "" if subject == "attention" else f" of the {subject}"
        times = curves(group, "time_s")
        if times:
            ratios = {gain.label: show_ratio(gain.ratio) for gain in gains(times)}
            speed = {curve.label: "1" for curve in times if curve.backend == YARDSTICK} | ratios
            extra = {"speed, exact = 1": speed if ratios else {}}
            table = _cost_table(f"Time per call{place}, ms", times, _MILLISECOND, extra)
            timed = [point.record for curve in times for point in curve.measured]
            made.append(table._replace(notes=(*table.notes, _model(timed))))
        peaks = curves(group, "peak_bytes")
        if peaks:
            bytes_of = {"weights": "parameter_bytes", "state": "state_bytes"}
            extra = {name: _largest(group, quantity) for name, quantity in bytes_of.items()}
            made.append(_cost_table(f"Peak memory of a call{place}, MiB", peaks, _MEBIBYTE, extra))
    return made


def _model(records: Sequence[Record]) -> str:
    """The model behind the intervals of these times, and how many times have none."""
    few = sum(len(round_times(record)) < FEWEST_ROUNDS for record in records)
    lacking = f"; {few} of {len(records)} times have fewer and no interval" if few else ""
    return (
        "Intervals (±, and in brackets): 95 %, for the median within this run; one round is one sample, and "
        f"at least {FEWEST_ROUNDS} are needed (--rounds){lacking}. Another run can differ by more."
    )


def _cost_table(
    title: str, all_curves: Sequence[Curve], unit: float, extra: Mapping[str, Mapping[str, str]]
) -> Table:
    lengths = sorted({point.tokens for curve in all_curves for point in curve.points})
    shown = lengths[-_MOST_LENGTHS:]
    columns = ["backend", *(str(tokens) for tokens in shown), "grows as"]
    rows = [
        [
            curve.label,
            *(_cost(_find(curve, tokens), unit) for tokens in shown),
            show_growth(curve.growth),
        ]
        for curve in all_curves
    ]
    for name, cells in extra.items():
        if cells:
            columns.append(name)
            for row in rows:
                row.append(cells.get(row[0], ""))
    notes = [f"Shorter lengths are in the files: {', '.join(map(str, lengths[:-_MOST_LENGTHS]))}."]
    return Table(
        title,
        tuple(columns),
        tuple(map(tuple, rows)),
        tuple(notes * (len(lengths) > _MOST_LENGTHS)) + _failures(all_curves),
    )


def _largest(records: Sequence[Record], quantity: str) -> dict[str, str]:
    """Bytes at the longest length, in MiB, of every curve that has any."""
    last = {curve.label: curve.measured[-1] for curve in curves(records, quantity) if curve.measured}
    return {label: _cost(point, _MEBIBYTE) for label, point in last.items() if point.value}


def _find(curve: Curve, tokens: int) -> Point | None:
    return next((point for point in curve.points if point.tokens == tokens), None)


def _cost(point: Point | None, unit: float) -> str:
    if point is None:
        return ""
    if point.value is None:
        return point.record.status
    return show_spread(point.value, point.low, point.high, unit=unit)


def _failures(all_curves: Sequence[Curve]) -> tuple[str, ...]:
    """One line per backend and reason, with the lengths that it holds for."""
    lengths: dict[tuple[str, str, str | None], list[int]] = {}
    for curve in all_curves:
        for point in curve.points:
            if point.record.status != "ok":
                key = (curve.label, point.record.status, point.record.reason)
                lengths.setdefault(key, []).append(point.tokens)
    return tuple(
        f"{label}, {', '.join(map(str, tokens))} tokens: {status}: {reason}"
        for (label, status, reason), tokens in lengths.items()
    )
