"""Table 3 of Wang et al. 2020: how much time and memory Linformer saves, by length and rank."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from efficient_attn.report.figures import Axis, Chart, Plot, Series, in_rows
from efficient_attn.report.palette import INK
from efficient_attn.report.table import Table
from efficient_attn.runner.isolation import DEFAULT_ISOLATION, NONE
from efficient_attn.runner.records import Record
from efficient_attn.runner.variants import select
from efficient_attn.studies.costs import cost_points, measurer_for
from efficient_attn.studies.plan import Plan
from efficient_attn.studies.reproduce.figures import Setting
from efficient_attn.studies.reproduce.figures.linformer_table3 import claims
from efficient_attn.studies.reproduce.figures.linformer_table3.claims import (
    DENSE,
    FUSED,
    LENGTHS,
    LINFORMER,
    MEMORY,
    RANKS,
    TIME,
    Saved,
    measured,
)
from efficient_attn.studies.workload import Workload, settle

TITLE = "Table 3: time and memory that Linformer saves, by length and rank"
PAPER = "Wang et al. 2020, Linformer: Self-Attention with Linear Complexity, https://arxiv.org/abs/2006.04768"

findings = claims.findings

# A block of width 256. The wider a block, the less its attention weighs, and the less there is to save.
_NUM_HEADS, _HEAD_DIM = 4, 64

# The batch shrinks as the length grows, so that all lengths have as many tokens; beyond, it is one sequence.
_TOTAL_TOKENS = 4096

_QUICK_LENGTHS, _QUICK_TOTAL_TOKENS = LENGTHS[:2], LENGTHS[1]

# Seconds after which a point is given up.
_TIMEOUT_S = 60.0
_MEMORY_LIMIT = "70%"

_BACKENDS = (FUSED, DENSE, LINFORMER)

# From light to dark as ranks grow; readable on white.
_SHADES = ("#e69f00", "#d55e00", "#cc4c88", "#7b4fb5", "#1f3b73")


def plan(setting: Setting) -> Plan:
    """Blocks at every length and rank up to half of it, as in the paper; as far as memory and budget go."""
    workload = settle(
        Workload(of="block", num_heads=_NUM_HEADS, head_dim=_HEAD_DIM, device="cpu", threads=setting.threads)
    )
    total = _QUICK_TOTAL_TOKENS if setting.quick else _TOTAL_TOKENS
    measurer, limit, _ = measurer_for(
        select(_BACKENDS),
        workload,
        isolate=NONE if setting.quick else DEFAULT_ISOLATION,
        timeout_s=_TIMEOUT_S,
        memory_limit=_MEMORY_LIMIT,
    )
    points = []
    for tokens in _QUICK_LENGTHS if setting.quick else LENGTHS:
        ranks = [size for size in RANKS if (tokens, size) in TIME.paper]
        variants = select(_BACKENDS, {LINFORMER: {"rank": ranks, "sharing": ["layers"]}})
        shared = {**vars(workload), "batch": max(total // tokens, 1), "inputs": "gaussian"}
        points += cost_points(
            variants, [tokens], shared, measure=measurer, rounds=setting.rounds, limit_bytes=limit
        )
    return Plan(points=points, timeout_s=_TIMEOUT_S, resources=measurer)


def tables(records: Sequence[Record]) -> list[Table]:
    """Time saved, then memory saved: ours against both baselines, and the paper's."""
    notes = (
        "Each cell: against exact-dense / against fused exact (in the paper). – is not measured.",
        *_conditions(records),
    )
    return [
        _table(records, TIME, "Time saved, times", ()),
        _table(records, MEMORY, "Memory saved, times (peak bytes of a call)", notes),
    ]


def draw(records: Sequence[Record]) -> Plot:
    """Four charts: time and memory saved, against softmax written out and against the fused kernel."""
    charts = [_chart(records, saved, baseline) for saved in (TIME, MEMORY) for baseline in (DENSE, FUSED)]
    conditions = "dashed: in the paper, against its own softmax"
    legend = next((c.series for c in charts if c.drawable().series), ())
    return Plot(
        "Time and memory that Linformer saves",
        conditions,
        in_rows(charts),
        tuple(one for one in legend if one.entry is None and one.label),
    )


def _chart(records: Sequence[Record], saved: Saved, baseline: str) -> Chart:
    name = {DENSE: "materialised softmax (exact-dense)", FUSED: "fused softmax (exact)"}[baseline]
    none = Series("", (), (1.0,), {"color": INK, "linewidth": 0.9}, entry="")
    ours = {"linestyle": "-", "marker": "o", "markersize": 4.5, "linewidth": 1.8}
    paper = {"linestyle": (0, (2, 2)), "alpha": 0.55, "linewidth": 1.2}
    series = [
        *_lines(measured(records, saved, baseline), ours, None),
        *_lines(saved.paper, paper, ""),
    ]
    places = sorted({x for one in series for x in one.x})
    return Chart(
        Axis("tokens n", "log2", "{:.0f}".format, places),
        Axis(scale="log", show="{:g}×".format),
        (none, *series),
        f"{saved.unit.capitalize()} saved, against {name}",
    )


def _lines(
    ratios: Mapping[tuple[int, int], float], style: Mapping[str, Any], entry: str | None
) -> Iterator[Series]:
    for size, colour in zip(RANKS, _SHADES, strict=True):
        line = sorted((tokens, ratio) for (tokens, its), ratio in ratios.items() if its == size)
        x, y = zip(*line, strict=True) if line else ((), ())
        yield Series(f"rank {size}", x, y, {**style, "color": colour}, entry=entry)


def _table(records: Sequence[Record], saved: Saved, title: str, notes: tuple[str, ...]) -> Table:
    dense, fused = (measured(records, saved, baseline) for baseline in (DENSE, FUSED))

    def cell(place: tuple[int, int]) -> str:
        if place not in saved.paper:
            return ""
        ours = " / ".join(f"{r[place]:.2g}" if place in r else "–" for r in (dense, fused))
        return f"{ours} ({saved.paper[place]:g})"

    rows = ((str(n), *(cell((n, size)) for size in RANKS)) for n in LENGTHS)
    return Table(title, ("tokens", *(f"rank {size}" for size in RANKS)), tuple(rows), notes)


def _conditions(records: Sequence[Record]) -> tuple[str, ...]:
    if not records:
        return ()
    case = records[0].case
    total = min(record.case.tokens * record.case.batch for record in records)
    return (
        f"One {case.of} of width {case.model_dim}, {case.num_heads} heads, {case.dtype}, "
        f"threads: {case.threads}; forward; {total} tokens in a batch, one sequence where it is longer.",
        "One projection for keys, values, heads and layers; it is not trained, which changes no cost.",
    )
