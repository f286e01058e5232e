"""Writes result and output on the README from the run of its first command."""

import re
from pathlib import Path
from typing import Any

import efficient_attn as ea

ROOT = Path(__file__).parent.parent
PAGE, RUN = ROOT / "README.md", ROOT / "results" / "epyc-2-cores" / "bench-default"
# Rows of the output, below its head.
_ROWS = ("exact", "window-clusters", "window", "linformer", "performer-full", "uniform attention")
_WIDTH = 100


def page(text: str) -> str:
    """The README with its result and its output as the run has them."""
    table = ea.read(RUN).tables()[0]
    text = re.sub(r"^\*\*Result.*?(?=\n\n)", lambda _: result(table), text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?<=```text\n).*?(?=```)", lambda _: output(table), text, count=1, flags=re.DOTALL)


def result(table: Any) -> str:
    """Speed, crossover and worst error of clusters, the most accurate of the faster backends."""
    cells = next(row for row in table.rows if row[0] == "window-clusters")
    error, speed, _, start = (re.search(r"[\d.]+", cell).group() for cell in cells[1:5])
    return (
        "**Result.** On two CPU cores `window-clusters` is faster than exact attention "
        f"from {start} tokens on,\n{speed} times at 4096, with an error of {100 * float(error):.0f} % "
        "on the worst layer of a real encoder (512 tokens)."
    )


def output(table: Any) -> str:
    """The head and some rows of the table that the command prints for the encoder."""
    from rich.console import Console

    from efficient_attn.report.table import to_rich

    shown = [number for number, row in enumerate(table.rows) if row[0] in _ROWS]
    # Marks move with their rows.
    best = tuple((shown.index(row), column) for row, column in table.best if row in shown)
    excerpt = table._replace(rows=[table.rows[number] for number in shown], best=best, worse=())
    console = Console(width=_WIDTH, color_system=None)
    with console.capture() as drawn:
        console.print(to_rich(excerpt, _WIDTH))
    lines = [line.rstrip() for line in drawn.get().splitlines() if line.strip()]
    return "\n".join(lines[1:]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
