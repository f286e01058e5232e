"""Sphinx extension: the directive `verdicts`, claims and verdicts of a reference run of `reproduce`.

Its table is read from the run whenever the site is built; the measurements behind it are linked.
"""

import re
from pathlib import Path
from typing import Any

from docutils.nodes import Node, container
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

RESULTS = Path(__file__).parent.parent / "results" / "epyc-2-cores"
_CELL = re.compile(r"(?<!\\)\|")


def claims(run: str) -> list[tuple[str, str]]:
    """Every claim of a run with its verdict."""
    rows = [
        [cell.strip() for cell in _CELL.split(line)[1:-1]]
        for line in (RESULTS / run / "verdicts.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    # The first two rows are the head.
    return [(claim, verdict) for claim, _, verdict in rows[2:]]


class Verdicts(Directive):
    """`{verdicts} RUN`."""

    required_arguments = 1

    def run(self) -> list[Node]:
        """The table, and a link to the run's own files."""
        (run,) = self.arguments
        # Runs change without the page.
        self.state.document.settings.env.note_reread()
        table = [("claim", "verdict"), ("---", "---"), *claims(run)]
        rows = [f"| {claim} | {verdict} |" for claim, verdict in table]
        files = f"[Measurements and tables](results.md#{run}) of `results/{RESULTS.name}/{run}`."
        parent = container()
        self.state.nested_parse(StringList([*rows, "", files]), self.content_offset, parent)
        return list(parent.children)


def setup(app: Any) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("verdicts", Verdicts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
