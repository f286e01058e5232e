"""Linformer, Figure 1: cumulative singular values of the attention matrices of a trained encoder.

The paper shows RoBERTa; here it is all-MiniLM-L6-v2, whose layers 0, 1 and 5 are shipped, on one text of 512
tokens. The relative error of the best matrix of rank r is the root of the share of the squares of the
remaining singular values (Eckart and Young 1936). Takes about 5 seconds.
"""

from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import torch
from claims import Claim, median_interval, parse_arguments, report, verdict

import efficient_attn as ea

PAPER = "Wang et al. 2020, Linformer: Self-Attention with Linear Complexity, https://arxiv.org/abs/2006.04768"
LAYERS = (0, 1, 5)
FRACTION = 1 / 4  # rank 128 of 512, the heat map of the figure
MOST, SMALL = 0.5, 0.1  # "most" is more than half of the sum; a small error is 10 %

arguments = parse_arguments(__doc__)
tokens = 64 if arguments.quick else 512
rank = round(tokens * FRACTION)

spectra = {}
for layer in LAYERS:
    q, k, _ = (x[0, :, :tokens] for x in ea.sample(layer, dtype=torch.float64))
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)
    spectra[layer] = torch.linalg.svdvals(weights).numpy()  # [heads, tokens], largest first

shares = {layer: s[:, :rank].sum(axis=1) / s.sum(axis=1) for layer, s in spectra.items()}
errors = {layer: np.sqrt((s[:, rank:] ** 2).sum(axis=1) / (s**2).sum(axis=1)) for layer, s in spectra.items()}


def by_layer(values: dict) -> str:
    """Median over heads of each layer, with the least and the largest head."""
    return "; ".join(
        f"{np.median(heads):.3g} ({heads.min():.3g} to {heads.max():.3g}) in layer {layer}"
        for layer, heads in values.items()
    )


def more_skewed(higher: int, lower: int) -> bool | None:
    """Whether the median over heads is larger, or None if the intervals overlap."""
    high, low = (median_interval(shares[layer].tolist()) for layer in (higher, lower))
    return None if high.low <= low.high and low.low <= high.high else high.low > low.high


most = {
    f"head {head} of layer {layer}": bool(share > MOST)
    for layer in LAYERS
    for head, share in enumerate(shares[layer])
}
skewed = {f"layer {high} against {low}": more_skewed(high, low) for low, high in combinations(LAYERS, 2)}
small = {f"layer {layer}": bool(np.median(errors[layer]) < SMALL) for layer in LAYERS}
share_text = f"share of the first {rank} of {tokens} singular values, median over heads: {by_layer(shares)}"
claims = [
    Claim("Most of an attention matrix is in its largest singular values", share_text, verdict(most)),
    Claim("Spectra of higher layers are more skewed", share_text, verdict(skewed)),
    Claim(
        "A quarter of the rank approximates attention matrices, to 10 % in every layer",
        f"relative error of the best matrix of rank {rank}: {by_layer(errors)}",
        verdict(small),
    ),
]

figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
for layer, s in spectra.items():
    lines = np.insert(s.cumsum(axis=1) / s.sum(axis=1, keepdims=True), 0, 0.0, axis=1)
    ax.plot(np.median(lines, axis=0), label=f"layer {layer}")
    ax.fill_between(range(tokens + 1), lines.min(axis=0), lines.max(axis=0), alpha=0.15)
ax.axvline(rank, color="gray", linestyle="--", linewidth=0.8)
ax.set(
    title="Spectra of attention matrices: medians and range over heads",
    xlabel="index of the singular value",
    ylabel="normalised cumulative singular values",
)
ax.legend()

report(
    "linformer_fig1",
    f"{PAPER}, Figure 1",
    claims,
    arguments=arguments,
    settings={"model": "all-MiniLM-L6-v2", "layers": LAYERS, "tokens": tokens, "rank": rank},
    numbers={
        f"layer {layer}": {
            "share": [round(float(x), 4) for x in shares[layer]],
            "error": [round(float(x), 4) for x in errors[layer]],
        }
        for layer in LAYERS
    },
    figure=figure,
)
