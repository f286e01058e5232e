"""Colours, markers and strokes that everybody can tell apart, the same for a backend in every plot."""

from collections.abc import Sequence
from typing import Any

INK, MUTED = "#222222", "#6b6b6b"

# The colours of Okabe and Ito (2008), made for all kinds of colour vision; exact attention is black.
_OWN = {
    "exact": ("#000000", "o"),
    "exact-dense": ("#7a7a7a", "s"),
    "window": ("#009e73", "^"),
    "linformer": ("#d98c00", "D"),
    "performer-positive": ("#0072b2", "v"),
    "performer-trig": ("#cc4c88", "P"),
    "performer-hyperbolic": ("#3a9bd9", "<"),
}
_OTHERS = (("#d55e00", "X"), ("#3a9bd9", "<"), ("#8a6d00", ">"), ("#7b4fb5", "p"))
_STROKES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))


def line_styles(lines: Sequence[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """{label: style} for lines given as (label, backend); variants of one backend differ by their stroke."""
    backends = list(dict.fromkeys(backend for _, backend in lines))
    others = [backend for backend in backends if backend not in _OWN]
    styles: dict[str, dict[str, Any]] = {}
    for label, backend in lines:
        variant = sum(known == backend for seen, known in lines if seen in styles)
        colour, marker = _OWN.get(backend) or _OTHERS[others.index(backend) % len(_OTHERS)]
        styles[label] = {
            "color": colour,
            "marker": marker,
            "markersize": 5,
            "linestyle": _STROKES[variant % len(_STROKES)],
            "linewidth": 2.4 if backend == "exact" else 1.8,
        }
    return styles
