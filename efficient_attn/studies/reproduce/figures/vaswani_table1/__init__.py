"""Table 1 of Vaswani et al. 2017: operations per layer, sequential operations, maximum path length."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from efficient_attn.report.figures import Axis, Chart, Plot, Series, in_rows
from efficient_attn.report.palette import line_styles
from efficient_attn.report.table import Table
from efficient_attn.runner.records import Case, Record
from efficient_attn.runner.units import show_seconds
from efficient_attn.stats.rounds import RUN_SHIFT, call_time
from efficient_attn.stats.verdicts import span
from efficient_attn.studies.plan import Plan, Point
from efficient_attn.studies.reproduce.figures import Setting
from efficient_attn.studies.reproduce.figures.vaswani_table1 import claims
from efficient_attn.studies.reproduce.figures.vaswani_table1.claims import (
    OPERATIONS,
    PATH,
    ROWS,
    TIME,
    by_tokens,
    cells,
)
from efficient_attn.theory.complexity import TABLE_1

TITLE = "Table 1: complexity per layer, sequential operations, maximum path length"
PAPER = "Vaswani et al. 2017, Attention Is All You Need, https://arxiv.org/abs/1706.03762"

findings = claims.findings

_NUM_HEADS = 8


class Sizes(NamedTuple):
    """Tokens at one width, widths at one number of tokens, tokens of the paths at their width."""

    tokens: tuple[int, ...]
    width: int
    widths: tuple[int, ...]
    length: int
    path_tokens: tuple[int, ...]
    path_width: int


_SIZES = Sizes(
    (64, 128, 256, 512, 1024, 2048), 256, (64, 128, 256, 512, 1024), 256, (16, 32, 64, 128, 256), 16
)
_QUICK = Sizes((64, 128, 192, 256), 32, (16, 32, 48, 80), 64, (16, 32), 8)


def plan(setting: Setting) -> Plan:
    """All points by rising length; counts first, which a budget should not cut off."""
    sizes = _QUICK if setting.quick else _SIZES
    line = {(n, sizes.width) for n in sizes.tokens}
    grid = line | {(sizes.length, d) for d in sizes.widths}
    points = [
        *(("count", n, d, OPERATIONS) for n, d in grid),
        *(("count", n, sizes.path_width, PATH) for n in sizes.path_tokens),
        *(("time", n, d, TIME) for n, d in line),
    ]
    return Plan(points=[_point(label, *point, setting) for point in sorted(points) for label in ROWS])


def _point(label: str, kind: str, n: int, d: int, of: str, setting: Setting) -> Point:
    row = ROWS[label]
    case = Case(
        kind=kind,
        backend=row.backend,
        label=label,
        options=row.options,
        of=of,
        num_heads=_NUM_HEADS,
        head_dim=d // _NUM_HEADS,
        tokens=n,
        # A gradient is tested for zero in float64, where least of it underflows.
        dtype="float64" if of == PATH else "float32",
        device="cpu",
        threads=setting.threads if of == TIME else 1,
    )
    return Point(
        case=case,
        measure=partial(_measured, case),
        rounds=setting.rounds if of == TIME else None,
        group=(kind, n),
        series=(label, of),
        cost=row.order(n, d),
    )


def _measured(case: Case, **seconds: float) -> Record:
    from efficient_attn.studies.reproduce.figures.vaswani_table1.measure import measure

    return measure(case, **seconds)


def tables(records: Sequence[Record]) -> list[Table]:
    """The paper's table with the measurement of every entry."""
    columns = (
        "layer",
        "complexity per layer",
        "operations for each",
        "time grows with",
        "sequential operations",
        "longest chain",
        "maximum path",
        "hops",
    )
    options = {str(value): name for row in ROWS.values() for name, value in row.options.items()}
    notes = (
        f"{', '.join(f'{name} {value}' for value, name in options.items())}; the recurrent layer is an LSTM, "
        "with 8 matrices of d² where the order counts one.",
        "Operations: of the matrix products and convolutions, a multiplication and an addition as two; "
        "padding counts, as it is computed, and kernels count as their written-out form does.",
        "Chain: matrix products that wait for one another; chains and hops: from the fewest to the most "
        "tokens.",
        "Projections are no part of the paper's table: it counts attention without them.",
    )
    return [Table(TITLE, columns, tuple(_row(records, label) for label in ROWS), notes)]


def _row(records: Sequence[Record], label: str) -> tuple[str, ...]:
    orders = TABLE_1[label]
    chains = [one.sequential_operations or 0 for one in by_tokens(cells(records, label, OPERATIONS)).values()]
    hops = [one.path_length or 0 for one in by_tokens(cells(records, label, PATH)).values()]
    return (
        label,
        f"O({orders.per_layer})",
        claims.multiples(records, label),
        claims.time_growth(records, label),
        f"O({orders.sequential_operations})",
        span(chains),
        f"O({orders.path_length})",
        span(hops),
    )


def draw(records: Sequence[Record]) -> Plot:
    """Three charts against tokens: time, sequential operations, path lengths."""
    styles = line_styles([(label, row.backend) for label, row in ROWS.items()])
    charts = {
        TIME: "Time of a layer",
        OPERATIONS: "Sequential operations: longest chain of matrix products",
        PATH: "Maximum path length, by gradients that are not zero",
    }
    shown = []
    for of, title in charts.items():
        series = [_series(records, label, of, styles[label]) for label in ROWS]
        places = sorted({x for one in series for x in one.x})
        y = Axis(scale="log", show=show_seconds if of == TIME else "{:.0f}".format)
        x = Axis("tokens n", "log2", "{:.0f}".format, places)
        shown.append(Chart(x, y, tuple(series), title, apart=True))
    conditions = f"bands: 95 % interval, with a shift of {RUN_SHIFT:.0%} between runs"
    return Plot("Complexity of a layer", conditions, in_rows(shown))


def _series(records: Sequence[Record], label: str, of: str, style: Mapping[str, Any]) -> Series:
    line = by_tokens(cells(records, label, of))
    if of == TIME:
        times = [call_time(record) for record in line.values()]
        median, low, high = ([getattr(time, name) for time in times] for name in ("median", "low", "high"))
        return Series(label, list(line), median, style, low, high)
    quantity = "path_length" if of == PATH else "sequential_operations"
    return Series(label, list(line), [getattr(record, quantity) or 0 for record in line.values()], style)
