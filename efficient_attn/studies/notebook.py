"""Progress of a run in a notebook: one bar, updated in place."""

import html
import sys
from collections.abc import Callable
from typing import Any

from efficient_attn.report.escape import plain
from efficient_attn.studies.engine import Progress


def notebook_bar() -> Callable[[Progress], None] | None:
    """A progress function that draws one bar below the cell; None outside of notebooks."""
    # A notebook has imported IPython before any of its cells; a terminal's IPython has no kernel.
    ipython = sys.modules.get("IPython")
    if ipython is None or getattr(ipython.get_ipython(), "kernel", None) is None:
        return None
    display: Any = ipython.display.display
    handle: Any = None

    def show(step: Progress) -> None:
        nonlocal handle
        if handle is None:
            handle = display(_drawn(step), raw=True, display_id=True)
        else:
            handle.update(_drawn(step), raw=True)

    return show


def _drawn(step: Progress) -> dict[str, str]:
    """The bar by media type."""
    line = plain(str(step))
    bar = f'<progress value="{step.done}" max="{step.total}"></progress>'
    return {"text/plain": line, "text/html": f"<div>{bar} {html.escape(line)}</div>"}
