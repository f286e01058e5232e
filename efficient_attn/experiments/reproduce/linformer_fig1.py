"""Figure 1 of Wang et al. 2020: cumulative singular values of the attention matrices of a trained encoder."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from efficient_attn.analysis.statistics import middle
from efficient_attn.analysis.verdicts import not_measured
from efficient_attn.experiments.reproduce import _fig1_claims as claims
from efficient_attn.experiments.reproduce._fig1 import (
    REAL,
    SHUFFLED,
    Head,
    cumulative,
    head_of,
    index_of,
    layers,
    least_error,
    needed,
    share,
    spectra,
)
from efficient_attn.experiments.reproduce._parts import Part, measure_parts
from efficient_attn.experiments.reproduction import Setting
from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.palette import INK, MUTED
from efficient_attn.report.table import Table
from efficient_attn.sweep.case import Case, Record, replace
from efficient_attn.sweep.run import Step

TITLE = "Figure 1: normalised cumulative singular values of attention matrices, by layer and head"
PAPER = "Wang et al. 2020, Linformer: Self-Attention with Linear Complexity, https://arxiv.org/abs/2006.04768"

findings = claims.findings

_HEADS, _HEAD_DIM, _TOKENS, _QUICK_TOKENS = 12, 32, 512, 64

# Shipped samples: three layers of the first text, and the middle layer of the others.
_PLACES = ((0, 0), (1, 0), (5, 0), (1, 1), (1, 2), (1, 3))
_SHADES = {0: "#d98c00", 1: "#0072b2", 5: "#7b4fb5"}


def measure(
    setting: Setting, *, emit: Callable[[Record], None], progress: Callable[[Step], None] | None
) -> bool:
    """Layer by layer, text by text; of the first text also with shuffled rows."""
    tokens = _QUICK_TOKENS if setting.quick else _TOKENS
    parts = []
    for layer, text in _PLACES:
        matrices = (REAL, SHUFFLED) if text == 0 else (REAL,)
        heads = [Head(text, layer, head) for head in range(_HEADS)]
        empty = [_record(head, matrix, tokens, setting.threads) for matrix in matrices for head in heads]
        parts.append(Part(f"layer {layer} of text {text}", partial(_measured, empty, tokens), empty))
    return measure_parts(parts, setting, emit=emit, progress=progress)


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row for each head and matrix."""
    made = []
    for record in records:
        values = np.asarray(record.singular_values or ())
        row: dict[str, Any] = {**head_of(record.case)._asdict(), "matrix": record.case.label}
        row |= {"tokens": record.case.tokens, "not_measured": record.reason}
        if len(values):
            row |= {
                "index": index_of(values),
                "cumulative_share": share(values),
                "least_relative_error": least_error(values),
                "singular_values_for_90_percent": needed(values),
            }
        made.append(row)
    return made


def tables(records: Sequence[Record]) -> list[Table]:
    """One row for each layer and text: medians over heads, from the least to the largest."""
    body = []
    for matrix in (REAL, SHUFFLED):
        for (layer, text), heads in layers(spectra(records, matrix)).items():
            measures = (list(map(measured, heads)) for measured in (share, least_error, needed))
            cells = (f"{middle(one).median:.3g} ({min(one):.3g} to {max(one):.3g})" for one in measures)
            body.append((f"layer {layer}, text {text}, {matrix}", *cells))
    index = next((index_of(values) for values in spectra(records, REAL).values()), 0)
    tokens = next((record.case.tokens for record in records), 0)
    columns = (
        "matrix",
        f"share of the first {index} of {tokens}",
        "error of the best matrix of that rank",
        "singular values for 90 % of the sum",
    )
    notes = (
        "Medians over 12 heads (least to largest), in float64, of the shipped activations of "
        "all-MiniLM-L6-v2, layers counted from 0 to 5; the paper has RoBERTa and prints no numbers.",
        "Shuffled rows: the weights of every row in a random order (seed 0), which keeps how flat it is.",
        *not_measured(records),
    )
    return [Table(TITLE, columns, tuple(body), notes)]


def draw(records: Sequence[Record]) -> Plot:
    """The cumulative curves, and the paper's heat map by layer and head."""
    groups = layers(spectra(records, REAL))
    first = next(iter(groups.values()), [np.ones(1)])[0]
    curves = Chart(
        Axis("index of the singular value", show="{:.0f}".format, limits=(0, len(first))),
        Axis("normalised cumulative singular values", limits=(0, 1.02)),
        tuple(_series(records, index_of(first))),
        "Every head of text 0, medians in bold",
    )
    # From the top down as in the paper: the highest layer first.
    names = {float(row): f"layer {layer}, text {text}" for row, (layer, text) in enumerate([*groups][::-1])}
    heat = Chart(
        Axis("head", show="{:.0f}".format, ticks=range(_HEADS)),
        Axis(ticks=names),
        title=f"Share at index {index_of(first)} of {len(first)}",
        draw=partial(_heat, groups),
    )
    return Plot("Spectra of attention matrices", "", ((curves,), (heat,)) if groups else ())


def _series(records: Sequence[Record], index: int) -> Iterator[Series]:
    for matrix, stroke in ((REAL, "-"), (SHUFFLED, (0, (2, 2)))):
        for (layer, text), heads in layers(spectra(records, matrix)).items():
            if text != 0:
                continue
            lines = np.stack([np.insert(cumulative(values), 0, 0.0) for values in heads])
            style = {"color": _SHADES.get(layer, INK), "linestyle": stroke}
            label = f"layer {layer}" if matrix == REAL else f"layer {layer}, shuffled rows"
            x = range(lines.shape[1])
            if matrix == REAL:
                thin = {**style, "alpha": 0.35, "linewidth": 0.7}
                yield from (Series("", x, line.tolist(), thin, entry="") for line in lines)
            yield Series(label, x, np.median(lines, axis=0).tolist(), {**style, "linewidth": 2.2})
    yield Series("", (index,), (), {"color": MUTED, "linewidth": 0.8, "linestyle": (0, (4, 3))}, entry="")


def _heat(groups: Mapping[tuple[int, int], Sequence[Any]], ax: Any) -> None:
    shares = np.array([[share(values) for values in heads] for heads in groups.values()])
    ax.imshow(shares[::-1], aspect="auto", cmap="viridis", vmin=min(0.5, shares.min()), vmax=1)
    for (row, column), value in np.ndenumerate(shares[::-1]):
        colour = INK if value > 0.85 else "white"
        ax.text(column, row, f"{value:.2f}"[1:], ha="center", va="center", fontsize=9, color=colour)
    ax.grid(visible=False)


def _record(head: Head, matrix: str, tokens: int, threads: int) -> Record:
    """The record of a head before it is measured."""
    case = Case(
        kind="count",
        backend="exact",
        label=matrix,
        options=head._asdict(),
        of="weights",
        num_heads=_HEADS,
        head_dim=_HEAD_DIM,
        tokens=tokens,
        dtype="float64",
        device="cpu",
        threads=threads,
        inputs=head.inputs,
    )
    return Record(case=case)


def _measured(empty: Sequence[Record], tokens: int) -> Iterator[Record]:
    """The records of one layer and text with their singular values."""
    import torch

    from efficient_attn.measure.inputs import shipped
    from efficient_attn.ops.softmax.definition import softmax_weights

    first = head_of(empty[0].case)
    captured = shipped(first.text)
    q, k, _ = captured.layers[first.layer]
    scale = captured.scale or q.shape[-1] ** -0.5
    few = slice(tokens)
    weights = softmax_weights(q[..., few, :].double(), k[..., few, :].double(), scale=scale, key_mask=None)[0]
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(weights.shape, generator=generator).argsort(dim=-1)
    matrices = {REAL: weights, SHUFFLED: weights.gather(-1, order)}
    for record in empty:
        values = torch.linalg.svdvals(matrices[record.case.label][head_of(record.case).head])
        # Five digits suffice for the plot and keep the file small.
        yield replace(record, singular_values=tuple(float(f"{value:.5g}") for value in values.tolist()))
