"""Writes the table of record, and every page and picture that quotes it, from stored runs.

`python docs/record.py` writes parts of README.md, docs/speed.md and docs/quickstart.md, and two pictures of
the terminal. A part of a page stands between `<!-- NAME: written by docs/record.py -->` and `<!-- end -->`.
"""

import io
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import efficient_attn as ea
from efficient_attn.backends import list_backends, spec
from efficient_attn.measure.variants import UNIFORM_ATTENTION
from efficient_attn.report.table import Table, brief, to_rich

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "results" / "epyc-2-cores"
RUN, KERNEL, ADVICE = (RUNS / name for name in ("bench-512-8192", "mse-kernel", "advise-smollm2-4096"))
TRAINED = RUNS / "after-training" / "cells.jsonl"
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("speed", "quickstart", "after-training")),
]
TERMINAL = ROOT / "docs" / "images" / "bench-terminal"
_COMMAND = "efficient-attn bench --seq-len 512:8192:x2"

# Rows of the terminal on the first page.
_ROWS = ("exact", "window-clusters", "window", "linformer", "performer-full", "uniform attention")
_WIDTH = 90
_PART = re.compile(r"(<!-- (\w+): written by docs/record\.py -->\n).*?(<!-- end -->)", re.DOTALL)

_STAGES = ("untrained", "distilled", "scratch")
_DISTILLED = "Untrained and [distilled](docs/after-training.md), cosine of an encoder's embeddings:"
# A dark terminal in fonts of the reader's machine. Rich puts each text at its place.
_SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px;
}}
{styles}
</style>
<defs>{lines}</defs>
<rect width="100%" height="100%" rx="8" fill="#14171c"/>
<g transform="translate({terminal_x}, {terminal_y})">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def tables() -> tuple[Table, Table]:
    """The table of record of the encoder, and that of the decoder."""
    shown = ea.read(RUN).tables()
    compared = [table for table in shown if not table.detail]
    speeds = [table for table in shown if table.detail and table.title.endswith("speed-up over exact")]
    encoder, decoder = (_joined(*pair) for pair in zip(compared, speeds, strict=True))
    return encoder, decoder


def _joined(compared: Table, speeds: Table) -> Table:
    """Error, speed-up at each length, peak memory and crossover."""
    by_label = {row[0]: row[1:] for row in speeds.rows}
    error, memory, start = (_column(compared, name) for name in ("error", "MiB", "faster from"))
    columns = [compared.columns[error], *(f"{n} tokens" for n in speeds.columns[1:])]
    columns += [compared.columns[memory], compared.columns[start]]
    rows = [
        (
            row[0],
            brief(row[error]),
            *(brief(cell) for cell in by_label.get(row[0], ["–"] * (len(speeds.columns) - 1))),
            brief(row[memory]),
            brief(row[start]),
        )
        for row in compared.rows
    ]
    return Table(compared.title, ("backend", *columns), tuple(rows))


def _column(table: Table, name: str) -> int:
    return next(number for number, column in enumerate(table.columns) if column.startswith(name))


def texts() -> dict[str, str]:
    """Parts of pages by name."""
    encoder, decoder = tables()
    row = next(row for row in encoder.rows if row[0] == "window-clusters")
    tokens, speed, start = encoder.columns[-3].partition(" ")[0], row[-3], row[-1]
    errors_at, percent = re.sub("[^0-9]", "", encoder.columns[1]), f"{100 * float(row[1]):.0f}"
    result = (
        f"`{_COMMAND}`: `window-clusters` (exact over near keys, summaries of the\nothers) is faster than "
        f"exact attention above {start} tokens, {speed} as fast at {tokens}, at up to {percent} % output "
        f"error\n(worst layer of a real encoder, {errors_at} tokens):\n"
    )
    (kernel,) = ea.read(KERNEL).sentences()
    return {
        "found": result,
        "kernel": f"{kernel}\n",
        "advice": f"```text\n{advice()}\n```\n\n{_DISTILLED}\n\n{trained()}",
        "backends": backends(),
        "encoder": stages("encoder", "cosine", _STAGES[:2], ("512", "4096"), sign=-1),
        "decoder": stages("decoder", "bits", _STAGES, (), sign=1),
        "reading": reading(encoder, row),
        "record": f"{_markdown(encoder)}\n{_markdown(decoder)}",
    }


def reading(table: Table, row: tuple[str, ...]) -> str:
    """Meaning of each cell of a row."""
    errors_at, longest = (re.sub("[^0-9]", "", table.columns[number]) for number in (1, -3))
    uniform = next(cells[1] for cells in table.rows if cells[0] == UNIFORM_ATTENTION)
    rows = [
        (
            f"error, {errors_at} tokens",
            row[1],
            f"On the worst layer the output differs from exact attention by {100 * float(row[1]):.0f} % of "
            f"its norm. Uniform attention, which ignores queries and keys, has an error of {uniform}.",
        ),
        (f"speed-up, {longest} tokens", row[-3], "Time of `exact` over time of a call."),
        (f"MiB, {longest} tokens", row[-2], "Peak memory of a call."),
        ("faster from, tokens", row[-1], "Below this length `exact` is faster."),
    ]
    lines = ["| column | cell | meaning |", "|---|---|---|", *(f"| {' | '.join(cells)} |" for cells in rows)]
    return f"The row of `{row[0]}`:\n\n" + "\n".join(lines) + "\n"


def advice() -> str:
    """Loss and speed of the stored advice for a model: in bfloat16, and with a plan on top."""
    plan, precision, *_ = ea.read(ADVICE).sentences()
    losses = r"(loss .*?) nats, (copy recall [\d.]+ %)"
    half = re.search(rf"(model in bfloat16) (.*? faster.*?), KL .*?, {losses}", precision)
    over = "over the model in bfloat16 "
    heads = re.search(rf"At (\d+) tokens: {over}(.*?), with (a sliding window .*?): {losses}", plan)
    assert half and heads, (precision, plan)
    return (
        f"SmolLM2-135M, {heads[1]} tokens, {half[1]}: {half[2]}, {half[3]}, {half[4]}\n"
        f"{heads[3]}:\n{heads[2]} again, {heads[4]}, {heads[5]}"
    )


def backends() -> str:
    """Backends with their papers, by the growth of time and memory with n tokens and by causal masking."""
    powers = {1: "n", 2: "n²"}
    rows: dict[tuple[str, ...], list[str]] = {}
    for about in map(spec, list_backends()):
        able = about.capabilities
        kind = powers[able.time_growth], powers[able.memory_growth], "yes" if able.causal else "no"
        rows.setdefault(kind, []).append(f"[{about.name}]({about.paper})" if about.paper else about.name)
    lines = ["| backends and their papers | time | memory | causal |", "|---|---|---|---|"]
    lines += [f"| {', '.join(names)} | {' | '.join(kind)} |" for kind, names in sorted(rows.items())]
    return "\n".join(lines) + "\n"


def cells() -> dict[tuple[str, str], dict[str, float]]:
    """Medians over seeds of the cells of docs/examples/after_training.py, by row and stage."""
    return {key: {name: median(numbers) for name, numbers in cell.items()} for key, cell in seeds().items()}


def seeds() -> dict[tuple[str, str], dict[str, list[float]]]:
    """Numbers of all seeds by row and stage."""
    values: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in TRAINED.read_text(encoding="utf-8").splitlines():
        cell = json.loads(line)
        for name, value in cell.items():
            if isinstance(value, float):
                values[cell["row"], cell["stage"]][name].append(value)
    return values


def stages(model: str, name: str, columns: Sequence[str], lengths: Sequence[str], *, sign: int) -> str:
    """Medians with ranges over seeds by method and stage, and speed-ups, the best method first."""
    values = seeds()
    heads = [f"{model}: {name}", *columns, *(f"speed-up at {tokens}" for tokens in lengths)]
    rows: dict[str, list[list[float]]] = {}
    for row in dict.fromkeys(row for row, stage in values if stage.startswith(model)):
        rows[row] = [values.get((row, f"{model} {column}"), {}).get(name, []) for column in columns]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in sorted(rows, key=lambda row: sign * median([x for x in rows[row] if x][-1])):
        shown = [f"{median(x):.2f} ({min(x):.2f} to {max(x):.2f})" if x else "–" for x in rows[row]]
        shown += [f"{values[row, 'speed'][tokens][0]:.1f}×" for tokens in lengths]
        lines.append(f"| `{row}` | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def trained() -> str:
    """Cosines of embeddings of an encoder: methods that were distilled, and the nearest of all others."""
    stored = cells()
    rows: list[tuple[str, list[float]]] = []
    for row in dict.fromkeys(row for row, stage in stored if stage == "encoder untrained" and row != "exact"):
        stages = (stored.get((row, f"encoder {stage}")) for stage in ("untrained", "distilled"))
        rows.append((row, [cell["cosine"] for cell in stages if cell]))
    lines = ["| all layers replaced by | untrained | distilled 2 min |", "|---|---|---|"]
    rows.sort(key=lambda pair: -pair[1][-1])
    for row, cosines in [row for row in rows if len(row[1]) > 1 or row == rows[0]]:
        shown = [f"{cosine:.2f}" for cosine in cosines]
        lines.append(f"| `{row}` | {' | '.join([*shown, '–'][:2])} |")
    return "\n".join(lines) + "\n"


def _markdown(table: Table) -> str:
    columns = [name.replace(", tokens", "") for name in table.columns]
    rows = [[row[0] if row[0] == UNIFORM_ATTENTION else f"`{row[0]}`", *row[1:]] for row in table.rows]
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return f"{table.title}:\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(text: str) -> str:
    """A page with its parts as the runs have them."""
    parts = texts()
    return _PART.sub(lambda part: f"{part[1]}{parts[part[2]]}{part[3]}", text)


def terminal() -> Any:
    """A console that printed the command and rows of its first table."""
    from rich.console import Console
    from rich.text import Text

    table = next(table for table in ea.read(RUN).tables() if not table.detail)
    shown = [number for number, row in enumerate(table.rows) if row[0] in _ROWS]
    # Marks move with their rows.
    best = tuple((shown.index(row), column) for row, column in table.best if row in shown)
    excerpt = table._replace(rows=tuple(table.rows[number] for number in shown), best=best, worse=())
    console = Console(width=_WIDTH, record=True, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {_COMMAND}", style="green"))
    console.print(to_rich(excerpt, _WIDTH))
    return console


def pictures() -> dict[str, bytes]:
    """The terminal as SVG, whose letters stay text, and the same lines as PNG."""
    from matplotlib.figure import Figure

    from efficient_attn.report.drawing import to_bytes

    console = terminal()
    lines = console.export_text(clear=False).rstrip().splitlines()
    svg = console.export_svg(title="", code_format=_SVG, unique_id="bench")
    figure = Figure(figsize=(7.4, 0.19 * len(lines) + 0.2), facecolor="#14171c")
    for number, line in enumerate(lines):
        colour = "#98a84b" if line.startswith("$") else "#d9d9d9"
        place = 1 - (0.19 * number + 0.2) / figure.get_figheight()
        figure.text(0.02, place, line, family="DejaVu Sans Mono", size=9, color=colour, va="center")
    return {".svg": svg.encode(), ".png": to_bytes(figure, "png", salt="bench-terminal")}


def quoted() -> dict[str, set[str]]:
    """Numbers of speeds and crossovers of each backend in the table of record."""
    numbers: dict[str, set[str]] = {}
    for row in (row for table in tables() for row in table.rows):
        cells = [row[number] for number in (*range(2, len(row) - 2), len(row) - 1)]
        numbers.setdefault(row[0], set()).update(re.findall(r"\d[\d.]*", " ".join(cells)))
    return numbers


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
    for suffix, content in pictures().items():
        TERMINAL.with_suffix(suffix).write_bytes(content)
