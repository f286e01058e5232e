"""Table 3 of Wang et al. 2020: how much time and memory Linformer saves, by length and rank."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from efficient_attn.report.figures import Axis, Chart, Plot, Series, in_rows
from efficient_attn.report.table import Table
from efficient_attn.runner.isolation import DEFAULT_ISOLATION, NONE
from efficient_attn.runner.records import Record
from efficient_attn.runner.variants import select
from efficient_attn.stats.verdicts import Finding, cost, costs_less, of_all, span
from efficient_attn.studies.costs import cost_points, measurer_for
from efficient_attn.studies.plan import Plan
from efficient_attn.studies.reproduce.figures import Setting
from efficient_attn.studies.workload import Workload, settle

TITLE = "Table 3: time and memory that Linformer saves, by length and rank"
PAPER = "Wang et al. 2020, Linformer: Self-Attention with Linear Complexity, https://arxiv.org/abs/2006.04768"

_RANKS = (128, 256, 512, 1024, 2048)
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_TIME_SAVED = (
    (1.5, 1.3),
    (1.7, 1.6, 1.3),
    (2.6, 2.4, 2.1, 1.3),
    (3.4, 3.2, 2.8, 2.2, 1.3),
    (5.5, 5.0, 4.4, 3.5, 2.1),
    (8.6, 7.8, 7.0, 5.6, 3.3),
    (13, 12, 11, 8.8, 5.0),
    (20, 18, 16, 14, 7.9),
)
_MEMORY_SAVED = (
    (1.7, 1.5),
    (3.0, 2.9, 1.8),
    (6.1, 5.6, 3.6, 2.0),
    (14, 13, 8.3, 4.3, 2.3),
    (28, 26, 17, 8.5, 4.5),
    (56, 48, 32, 16, 8),
    (56, 48, 36, 18, 16),
    (60, 52, 40, 20, 18),
)

_LINFORMER = "linformer"

# Baselines in words: softmax attention as the papers have it, and as a kernel computes it.
_BASELINES = {"exact-dense": "materialised softmax (exact-dense)", "exact": "fused softmax (exact)"}
_BACKENDS = (*_BASELINES, _LINFORMER)

# A block of width 256. The wider a block, the less its attention weighs, and the less there is to save.
_NUM_HEADS, _HEAD_DIM = 4, 64

# The batch shrinks as the length grows, so that all lengths have as many tokens; beyond, it is one sequence.
_TOTAL_TOKENS = 4096

_QUICK_LENGTHS, _QUICK_TOTAL_TOKENS = _LENGTHS[:2], _LENGTHS[1]

# Seconds after which a point is given up.
_TIMEOUT_S = 60.0
_MEMORY_LIMIT = "70%"

# From light to dark as ranks grow; readable on white.
_SHADES = ("#e69f00", "#d55e00", "#cc4c88", "#7b4fb5", "#1f3b73")

# (tokens, rank) to how many times less is taken.
Ratios = Mapping[tuple[int, int], float]


def _as_ratios(rows: Sequence[Sequence[float]]) -> Ratios:
    return {
        (tokens, rank): ratio
        for tokens, row in zip(_LENGTHS, rows, strict=True)
        for rank, ratio in zip(_RANKS, row, strict=False)
    }


# The values printed in the paper, by kind of record.
_PAPER = {"time": _as_ratios(_TIME_SAVED), "memory": _as_ratios(_MEMORY_SAVED)}


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
    for tokens in _QUICK_LENGTHS if setting.quick else _LENGTHS:
        ranks = [rank for rank in _RANKS if (tokens, rank) in _PAPER["time"]]
        variants = select(_BACKENDS, {_LINFORMER: {"rank": ranks, "sharing": ["layers"]}})
        shared = {**vars(workload), "batch": max(total // tokens, 1), "inputs": "gaussian"}
        points += cost_points(
            variants, [tokens], shared, measure=measurer, rounds=setting.rounds, limit_bytes=limit
        )
    return Plan(points=points, timeout_s=_TIMEOUT_S, resources=measurer)


def _pairs(
    records: Sequence[Record], kind: str, baseline: str
) -> dict[tuple[int, int], tuple[Record, Record]]:
    """Linformer's record and the baseline's at every length and rank that both were measured at."""
    found = {
        (record.case.backend, record.case.tokens, int(record.case.options.get("rank", 0))): record
        for record in records
        if record.status == "ok" and record.case.kind == kind
    }
    return {
        (tokens, rank): (found[_LINFORMER, tokens, rank], found[baseline, tokens, 0])
        for backend, tokens, rank in sorted(found)
        if backend == _LINFORMER and (baseline, tokens, 0) in found
    }


def _ratios(records: Sequence[Record], kind: str, baseline: str) -> Ratios:
    """Cost of the baseline divided by the cost of Linformer."""
    return {place: cost(its) / cost(own) for place, (own, its) in _pairs(records, kind, baseline).items()}


def tables(records: Sequence[Record]) -> list[Table]:
    """Time saved, then memory saved: ours against both baselines, and the paper's."""
    note = (
        "Each cell: against exact-dense / against fused exact (in the paper). – is not measured. One "
        "projection for keys, values, heads and layers; it is not trained, which changes no cost."
    )
    return [
        _table(records, "time", "Time saved, times"),
        _table(records, "memory", "Memory saved, times (peak bytes of a call)", note),
    ]


def _table(records: Sequence[Record], kind: str, title: str, *notes: str) -> Table:
    measured = [_ratios(records, kind, baseline) for baseline in _BASELINES]

    def cell(place: tuple[int, int]) -> str:
        if place not in _PAPER[kind]:
            return ""
        ours = " / ".join(f"{ratios[place]:.2g}" if place in ratios else "–" for ratios in measured)
        return f"{ours} ({_PAPER[kind][place]:g})"

    rows = ((str(n), *(cell((n, rank)) for rank in _RANKS)) for n in _LENGTHS)
    return Table(title, ("tokens", *(f"rank {rank}" for rank in _RANKS)), tuple(rows), notes)


def draw(records: Sequence[Record]) -> Plot:
    """Four charts: time and memory saved, against softmax written out and against the fused kernel."""
    charts = [_chart(records, kind, baseline) for kind in _PAPER for baseline in _BASELINES]
    conditions = "dashed: in the paper, against its own softmax"
    return Plot("Time and memory that Linformer saves", conditions, in_rows(charts))


def _chart(records: Sequence[Record], kind: str, baseline: str) -> Chart:
    series = [
        *_series(_ratios(records, kind, baseline), {"marker": "o", "markersize": 4.5}, None),
        *_series(_PAPER[kind], {"linestyle": (0, (2, 2)), "alpha": 0.55, "linewidth": 1.2}, ""),
    ]
    return Chart(
        Axis("tokens n", "log2", "{:.0f}".format, sorted({x for one in series for x in one.x})),
        Axis(scale="log", show="{:g}×".format),
        tuple(series),
        f"{kind.capitalize()} saved, against {_BASELINES[baseline]}",
    )


def _series(ratios: Ratios, style: Mapping[str, Any], entry: str | None) -> Iterator[Series]:
    for rank, colour in zip(_RANKS, _SHADES, strict=True):
        line = {tokens: ratio for (tokens, own), ratio in sorted(ratios.items()) if own == rank}
        yield Series(f"rank {rank}", [*line], [*line.values()], {**style, "color": colour}, entry=entry)


def findings(records: Sequence[Record]) -> list[Finding]:
    """A verdict on every claim."""
    return [_saves(records, kind, baseline) for kind in _PAPER for baseline in _BASELINES]


def _saves(records: Sequence[Record], kind: str, baseline: str) -> Finding:
    """Linformer takes less than a baseline wherever both were measured."""
    ratios = _ratios(records, kind, baseline)
    claim = f"Linformer saves {kind} at every length and rank (Table 3), against {_BASELINES[baseline]}"
    answers = {
        f"n = {tokens}, rank {rank}": costs_less(*both)
        for (tokens, rank), both in _pairs(records, kind, baseline).items()
    }
    measured = f"{baseline} takes {span(list(ratios.values()))} times as much as linformer"
    return Finding(claim, measured if ratios else "no length was measured with both", of_all(answers))
