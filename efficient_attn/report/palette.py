"""Colours, markers and line styles, safe for colour blindness and equal for a backend in every plot."""

from collections.abc import Sequence
from typing import Any

from efficient_attn.runner.sizes import MEAN_OF_VALUES
from efficient_attn.runner.variants import CEILING

# Names of baselines in figures, where records have shorter ones.
DISPLAY_NAMES = {
    MEAN_OF_VALUES: "uniform-attention baseline",
    CEILING: "identity attention (upper bound)",
}

INK, MUTED, GRID = "#222222", "#6b6b6b", "#e3e3e3"

# The colours of Okabe and Ito (2008), made for all kinds of colour vision; exact attention is black.
_OWN = {
    "exact": ("#000000", "o"),
    "exact-dense": ("#7a7a7a", "s"),
    "window": ("#009e73", "^"),
    "linformer": ("#d98c00", "D"),
    "performer-positive": ("#0072b2", "v"),
    "performer-trig": ("#cc4c88", "P"),
    "performer-hyperbolic": ("#3a9bd9", "<"),
    "performer-oprf": ("#7b4fb5", "p"),
    "performer-full": ("#d55e00", "X"),
    "window-clusters": ("#00573f", "8"),
    CEILING: (MUTED, ""),
}
_OTHERS = (("#8a6d00", ">"), ("#008b8b", "h"), ("#8b4513", "d"), ("#5f6f1f", "*"))
_VARIANT_MARKERS = ("*", "h", "d", ">")
_STROKES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))


def line_styles(lines: Sequence[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """{label: style} for lines given as (label, backend); variants of one backend share its colour."""
    backends = list(dict.fromkeys(backend for _, backend in lines))
    others = [backend for backend in backends if backend not in _OWN]
    styles: dict[str, dict[str, Any]] = {}
    for label, backend in lines:
        variant = sum(known == backend for seen, known in lines if seen in styles)
        colour, marker = _OWN.get(backend) or _OTHERS[others.index(backend) % len(_OTHERS)]
        styles[label] = {
            "color": colour,
            "marker": _VARIANT_MARKERS[(variant - 1) % len(_VARIANT_MARKERS)] if variant else marker,
            "markersize": 5,
            # No attention, so no full line.
            "linestyle": _STROKES[(variant + (backend == CEILING) * 2) % len(_STROKES)],
            "linewidth": 2.4 if backend == "exact" else 1.8,
        }
    return styles


def baseline_style(number: int = 0) -> dict[str, Any]:
    """A thin grey line for a baseline; the first four have distinct dashes."""
    return {"color": MUTED, "linestyle": _STROKES[number % len(_STROKES)], "linewidth": 1.1, "marker": ""}


# The dashed line of the uniform-attention baseline and of guesses.
UNIFORM_STYLE: dict[str, Any] = {"color": INK, "linestyle": (0, (4, 3)), "linewidth": 1.2, "marker": ""}
