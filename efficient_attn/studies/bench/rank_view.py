"""Views of times on several ranks: table, cost model, sentence and plot."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.notes import failure_notes, setting
from efficient_attn.report.palette import line_styles
from efficient_attn.report.table import Table, show_range, show_spread, three_digits
from efficient_attn.runner.record import Record, replace
from efficient_attn.runner.units import show_seconds
from efficient_attn.stats.curves import grouped
from efficient_attn.stats.rounds import Typical, call_time, time_ratio

_TITLE = "Time of a call whose sequence the ranks share"

# Agreement of a measured time with its prediction.
_CLOSE = 0.25


class RankPoint(NamedTuple):
    """A measured time of a backend on some ranks.

    Attributes:
        predicted: Own work of a rank and the predicted exchanges, seconds; None if unknown.
        speed_up: Over the fewest ranks, at the same length; None for these.
    """

    label: str
    tokens: int
    ranks: int
    time: Typical
    predicted: float | None
    speed_up: float | None
    record: Record


def rank_points(records: Sequence[Record]) -> list[RankPoint]:
    """Measured points in the order of backends, lengths and ranks."""
    found = []
    for group in grouped(records, "label", "tokens"):
        measured = [one for one in group if one.status == "ok" and one.times_s and one.case.ranks]
        measured.sort(key=lambda one: one.case.ranks or 0)
        for one in measured:
            speed = None if one is measured[0] else time_ratio(one, measured[0]).median
            case = one.case
            found.append(
                RankPoint(
                    case.label, case.tokens, case.ranks or 1, call_time(one), _predicted(one), speed, one
                )
            )
    order = dict.fromkeys(one.case.label for one in records)
    return sorted(found, key=lambda one: ([*order].index(one.label), one.tokens, one.ranks))


def _predicted(record: Record) -> float | None:
    if not record.own_times_s or record.expected_exchange_s is None:
        return None
    return call_time(replace(record, times_s=record.own_times_s)).median + record.expected_exchange_s


def rank_tables(records: Sequence[Record]) -> list[Table]:
    """Times, throughput and exchanges; then the predictions of the cost model."""
    if not records:
        return []
    points, failures = rank_points(records), failure_notes(records)
    times = tuple((*_name(one), show_spread(*one.time[:3], unit=1e-3), *_throughput(one)) for one in points)
    columns = ("backend", "tokens", "ranks")
    cells = ("time, ms", "tokens/s per rank", "speed-up", "exchanges", "largest exchange, bytes")
    conditions = (setting(points[0].record.case),) if points else ()
    made = [Table(_TITLE, (*columns, *cells), times, (*conditions, _SLOWEST, *failures))]
    predicted = tuple((*_name(one), *_parts(one)) for one in points if one.predicted)
    if predicted:
        heads = ("own work, ms", "exchanges, ms", "predicted, ms", "measured, ms", "measured / predicted")
        notes = (_MODEL, *_links(points))
        made.append(Table("Cost model of several ranks", (*columns, *heads), predicted, notes))
    return made


_SLOWEST = (
    "Times: of the slowest rank. Bytes: sent by a rank. On the CPU one exchange of a call compares the calls "
    "of the ranks."
)
_MODEL = (
    "Own work: the calls of a rank in a group of one with its own tokens, or with all keys at hand, in turns "
    "with the others. Exchanges: theory.communication with α and β of this run."
)


def _name(one: RankPoint) -> tuple[str, str, str]:
    return one.label, str(one.tokens), str(one.ranks)


def _throughput(one: RankPoint) -> tuple[str, ...]:
    sent, time_s = one.record.exchange_bytes or (), one.time.median
    rate = three_digits(one.record.case.batch * one.tokens / time_s / one.ranks) if time_s else ""
    speed = "" if one.speed_up is None else f"{three_digits(one.speed_up)}x"
    return rate, speed, str(len(sent)), str(max(sent, default=0))


def _parts(one: RankPoint) -> tuple[str, ...]:
    exchange_s, predicted_s = one.record.expected_exchange_s or 0.0, one.predicted or 0.0
    shown = (predicted_s - exchange_s, exchange_s, predicted_s, one.time.median)
    return (*(three_digits(1e3 * value) for value in shown), f"{one.time.median / predicted_s:.2f}")


def _links(points: Sequence[RankPoint]) -> list[str]:
    """α and β of every number of ranks, with their standard errors."""
    found = {one.ranks: one.record for one in points if one.record.link_byte_s}
    return [
        f"{ranks} ranks: α = {show_seconds(record.link_latency_s)} "
        f"(± {show_seconds(record.link_latency_error_s)}), "
        f"β = {1e9 * record.link_byte_s:.3g} ns a byte (± {1e9 * record.link_byte_error_s:.1g}), "
        "with standard errors, fitted to gathers and all-reduces of 1 KiB to 4 MiB."
        for ranks, record in sorted(found.items())
    ]


def rank_sentences(records: Sequence[Record]) -> list[str]:
    """Agreement of the cost model with the times, by number of ranks."""
    ratios: dict[int, list[float]] = {}
    for one in rank_points(records):
        if one.predicted and one.ranks > 1:
            ratios.setdefault(one.ranks, []).append(one.time.median / one.predicted)
    return [
        f"Measured over predicted time on {ranks} ranks: median {median(found):.2f}, "
        f"{show_range(min(found), max(found))}; {sum(abs(one - 1) <= _CLOSE for one in found)} of "
        f"{len(found)} points are within {_CLOSE:.0%}."
        for ranks, found in sorted(ratios.items())
    ]


def rank_plot(records: Sequence[Record]) -> Plot:
    """Measured times against the number of ranks over lines of the prediction, a chart for each length."""
    points = rank_points(records)
    styles = line_styles(list({one.label: one.record.case.backend for one in points}.items()))
    charts = []
    for tokens in sorted({one.tokens for one in points}):
        here = [one for one in points if one.tokens == tokens]
        ranks = sorted({one.ranks for one in here})
        chart = Chart(
            Axis("ranks", "log2", "{:.0f}".format, ranks),
            Axis(scale="log", show=show_seconds),
            tuple(one for label in styles for one in _series(label, here, styles[label])),
            f"{tokens} tokens",
        )
        charts.append(chart)
    conditions = f"{setting(points[0].record.case)}; lines: cost model" if points else ""
    return Plot(_TITLE, conditions, (tuple(charts),))


def _series(label: str, points: Sequence[RankPoint], style: dict[str, object]) -> list[Series]:
    own = [one for one in points if one.label == label]
    ranks = [one.ranks for one in own]
    return [
        Series("", ranks, [one.predicted for one in own], {**style, "marker": "", "linewidth": 1.3}),
        Series(
            label,
            ranks,
            [one.time.median for one in own],
            {**style, "linestyle": "none"},
            [one.time.low for one in own],
            [one.time.high for one in own],
            bars=True,
        ),
    ]
