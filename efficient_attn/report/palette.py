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

INK, MUTED, GRID, PAPER, NIGHT = "#222222", "#6b6b6b", "#e3e3e3", "#ffffff", "#14171c"

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


def readable_on(paper: str, colour: str, *, contrast: float = 3.0) -> str:
    """The colour, mixed with black or white until it stands out from the paper (WCAG 2.2, 1.4.11: 3 to 1)."""
    goal = 0 if _luminance(paper) > 0.5 else 255
    channels = _channels(colour)
    for step in range(21):
        mixed = [round(own + (goal - own) * step / 20) for own in channels]
        found = "#" + "".join(f"{channel:02x}" for channel in mixed)
        if contrast_of(found, paper) >= contrast:
            break
    return found


def contrast_of(one: str, other: str) -> float:
    """The ratio of luminances that WCAG 2.2 calls contrast, 1 to 21."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    """Relative luminance of an sRGB colour."""
    shares = [channel / 255 for channel in _channels(colour)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _channels(colour: str) -> list[int]:
    return [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
