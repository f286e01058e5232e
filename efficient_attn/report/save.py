"""Figures as files: PNG, SVG and PDF, the same bytes from the same records."""

import io
from pathlib import Path
from typing import Any

from efficient_attn.report.axes import settle
from efficient_attn.report.files import write

_DOTS_PER_INCH = 200
_DOTS_PER_INCH_OF_A_NOTEBOOK = 100
KINDS = ("png", "svg", "pdf")


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG, SVG and PDF; the files."""
    return [write(folder / f"{name}.{kind}", to_bytes(figure, kind, salt=name)) for kind in KINDS]


def to_notebook(figure: Any) -> bytes:
    """The figure as a small PNG."""
    return to_bytes(figure, "png", salt="", dots_per_inch=_DOTS_PER_INCH_OF_A_NOTEBOOK)


def to_bytes(figure: Any, kind: str, *, salt: str, dots_per_inch: int = _DOTS_PER_INCH) -> bytes:
    """The figure as a file: undated, and with fixed names for its parts, so that equal ones are equal files.

    Args:
        salt: The seed of the names of an SVG's parts.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure.set_dpi(dots_per_inch)
    settle(figure)
    file = io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    # Letters stay text in an SVG, and fonts of a PDF are of the type that publishers accept.
    settings: Any = {"svg.hashsalt": salt, "svg.fonttype": "none", "pdf.fonttype": 42}
    canvases = {"png": FigureCanvasAgg, "pdf": FigureCanvasPdf, "svg": FigureCanvasSVG}
    with rc_context(settings):
        # `savefig` draws everything twice, at first for the layout, which is settled.
        getattr(canvases[kind](figure), f"print_{kind}")(file, metadata=undated)
    return file.getvalue()
