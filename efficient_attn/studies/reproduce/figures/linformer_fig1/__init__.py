"""Figure 1 of Wang et al. 2020: cumulative singular values of the attention matrices of a trained encoder."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.palette import INK, MUTED
from efficient_attn.report.table import Table
from efficient_attn.runner.record import Case, Record
from efficient_attn.runner.worker import answer
from efficient_attn.stats.median import middle
from efficient_attn.studies.plan import Plan, Point
from efficient_attn.studies.reproduce.figures import Setting
from efficient_attn.studies.reproduce.figures.linformer_fig1 import claims
from efficient_attn.studies.reproduce.figures.linformer_fig1.claims import (
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

TITLE = "Figure 1: normalised cumulative singular values of attention matrices, by layer and head"
PAPER = "Wang et al. 2020, Linformer: Self-Attention with Linear Complexity, https://arxiv.org/abs/2006.04768"

findings = claims.findings

_HEADS, _HEAD_DIM, _TOKENS, _QUICK_TOKENS = 12, 32, 512, 64

# Shipped samples: three layers of the first text, and the middle layer of the others.
_PLACES = ((0, 0), (1, 0), (5, 0), (1, 1), (1, 2), (1, 3))
_SHADES = {0: "#d98c00", 1: "#0072b2", 5: "#7b4fb5"}


def plan(setting: Setting) -> Plan:
    """Layer by layer, text by text; the first text also with shuffled rows."""
    tokens = _QUICK_TOKENS if setting.quick else _TOKENS
    cases = [
        case_of(Head(text, layer, head), matrix, tokens, setting.threads)
        for layer, text in _PLACES
        for matrix in ((REAL, SHUFFLED) if text == 0 else (REAL,))
        for head in range(_HEADS)
    ]
    points = [
        Point(case=case, measure=partial(answer, case, partial(_measured, case)), label=case.inputs)
        for case in cases
    ]
    return Plan(points=points)


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


def case_of(head: Head, matrix: str, tokens: int, threads: int) -> Case:
    """The case of a head and a matrix."""
    return Case(
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


def _measured(case: Case) -> Record:
    """The singular values of one head."""
    import torch

    head = head_of(case)
    values = torch.linalg.svdvals(_weights(head.text, head.layer, case.tokens)[case.label][head.head])
    # Five digits suffice for everything that is drawn, and keep the file small.
    return Record(case=case, singular_values=tuple(float(f"{value:.5g}") for value in values.tolist()))


@lru_cache(maxsize=1)
def _weights(text: int, layer: int, tokens: int) -> dict[str, Any]:
    """The attention matrices of all heads, as they are and with shuffled rows."""
    import torch

    from efficient_attn.measure.inputs import shipped
    from efficient_attn.ops.softmax.definition import softmax_weights

    captured = shipped(text)
    q, k, _ = captured.layers[layer]
    scale = captured.scale or q.shape[-1] ** -0.5
    few = slice(tokens)
    weights = softmax_weights(q[..., few, :].double(), k[..., few, :].double(), scale=scale, key_mask=None)[0]
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(weights.shape, generator=generator).argsort(dim=-1)
    return {REAL: weights, SHUFFLED: weights.gather(-1, order)}
