"""Figures of docs/errors.md from fixed seeds; docs/images.py saves them."""

import math
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import efficient_attn as ea
from efficient_attn.measure.error import exact_output, mean_of_values, output_error
from efficient_attn.measure.inputs import gaussian
from efficient_attn.report.figures import GRID, INK, MUTED, line_styles

TOKENS = 512
LAYERS, SIZES, FEATURE_DRAWS = (0, 1, 5), (16, 64, 256, 1024), 8
NORMS = (0.5, 1.0)
_QUANTILES = np.linspace(0.001, 0.999, 400)
# Inches; letters keep their size, so that a phone shows them legibly.
_WIDTH = 6.0
_SHADES = {0: "#d98c00", 1: "#0072b2", 5: "#7b4fb5"}


def lengths(q: Tensor, k: Tensor) -> Tensor:
    """|x + y|² of every query and key, with x = q d^(−1/4) and y = k d^(−1/4)."""
    squares = q.square().sum(dim=-1)[..., :, None] + k.square().sum(dim=-1)[..., None, :] + 2 * q @ k.mT
    return (squares / math.sqrt(q.shape[-1])).clamp_min(0.0)


def errors_on(layer: int, name: str, size: int) -> tuple[float, float, float]:
    """Relative output error on the shipped activations: median, least and largest over draws."""
    q, k, v = ea.sample(layer=layer)
    exact = exact_output(q, k, v, scale=q.shape[-1] ** -0.5)
    found = []
    for seed in range(FEATURE_DRAWS):
        backend = ea.build(name, head_dim=q.shape[-1], num_features=size, seed=seed)
        if backend.needs_calibration:
            backend.calibrate(q, k, v)
        with torch.no_grad():
            found.append(output_error(backend(q, k, v), exact).relative)
    return float(np.median(found)), min(found), max(found)


def mean_error(layer: int) -> float:
    """The relative output error of giving every query the mean of the values."""
    q, k, v = ea.sample(layer=layer)
    return output_error(mean_of_values(q, v), exact_output(q, k, v, scale=q.shape[-1] ** -0.5)).relative


def draw_lengths() -> Figure:
    """What share of pairs is below a length, for Gaussian inputs and real ones, and what that costs."""
    figure = Figure(figsize=(_WIDTH, 6.6), layout="constrained")
    above, below = figure.subplots(2, 1)
    for norm in NORMS:
        q, k, _ = gaussian(norm=norm, tokens=TOKENS, head_dim=16)
        _share(
            above,
            lengths(q, k),
            "#555555",
            "-" if norm == 1 else (0, (4, 2)),
            f"Gaussian, d = 16, norm {norm:g}",
        )
    for layer in LAYERS:
        q, k, _ = ea.sample(layer=layer)
        _share(above, lengths(q.double(), k.double()), _SHADES[layer], "-", f"encoder, layer {layer}")
    above.set_xscale("log")
    above.set_xlim(0.4, 400)
    above.legend(frameon=False, fontsize=9, loc="lower right")
    dress(above, "Share of pairs of query and key with a smaller |x + y|²", "|x + y|²")
    square = np.linspace(0.3, 40, 300)
    below.plot(square, np.expm1(square), color="#0072b2", linewidth=2)
    for features in (256, 1_000_000):
        below.axhline(features, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
        below.annotate(
            f"{features:,} features".replace(",", " "),
            (39.5, features * 1.25),
            ha="right",
            fontsize=9,
            color=MUTED,
        )
    below.set_yscale("log")
    below.set_ylim(0.1, 1e17)
    dress(below, "Positive features for an error as large as the entry", "|x + y|²")
    return figure


def draw_real() -> Figure:
    """The output error on the shipped activations against features, layer by layer."""
    figure = Figure(figsize=(_WIDTH, 7.8), layout="constrained")
    names = ("performer-positive", "performer-full")
    styles = line_styles([(name, name) for name in names])
    for ax, layer in zip(figure.subplots(len(LAYERS), 1, sharex=True), LAYERS, strict=True):
        for name in names:
            found = [errors_on(layer, name, size) for size in SIZES]
            median, low, high = (np.array(column) for column in zip(*found, strict=True))
            print("layer", layer, name, [f"{value:.2f}" for value in median])
            ax.plot(SIZES, median, label=name, **styles[name])
            ax.fill_between(SIZES, low, high, color=styles[name]["color"], alpha=0.15, linewidth=0)
        off = [errors_on(layer, "performer-trig", size)[0] for size in SIZES]
        ax.text(
            16,
            0.03,
            f"performer-trig: {min(off):.0f} to {max(off):.0f}, off the scale",
            fontsize=9,
            color=MUTED,
        )
        level = mean_error(layer)
        print("layer", layer, "uniform attention", f"{level:.2f}")
        ax.axhline(level, color=INK, linestyle=(0, (4, 3)), linewidth=1.2, label="uniform attention")
        ax.set_xscale("log", base=2)
        ax.set_xticks(SIZES, [str(size) for size in SIZES])
        ax.set_ylim(0, 1.25)
        dress(ax, f"Layer {layer}", "features" if layer == LAYERS[-1] else "")
        ax.set_ylabel("relative output error")
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    return figure


def dress(ax: Any, title: str, x: str) -> None:
    """A quiet grid, a title, the name of the axis."""
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
    ax.set_xlabel(x, color=INK)
    ax.tick_params(colors=INK, labelsize=10)


def _share(ax: Any, squares: Tensor, colour: str, stroke: Any, label: str) -> None:
    ax.plot(
        np.quantile(squares.numpy(), _QUANTILES),
        _QUANTILES,
        color=colour,
        linestyle=stroke,
        label=label,
        linewidth=2,
    )
    print(
        label, "quantiles .05 .5 .95 of |x + y|²:", np.quantile(squares.numpy(), (0.05, 0.5, 0.95)).round(2)
    )
