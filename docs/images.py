"""Draws every picture of docs/images from its records or the shipped activations.

`python docs/images.py` draws all of them, `python docs/images.py NAME…` the named ones.
docs/images/sources.json keeps two digests of each picture, by which tests find a stale one: of its source,
and of the texts and data points on it. Colours, sizes and places of labels make no picture stale.
"""

import hashlib
import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RUNS = HERE.parent / "results" / "epyc-2-cores"
DATA = HERE.parent / "efficient_attn" / "data"
IMAGES = HERE / "images"
SOURCES = IMAGES / "sources.json"

# Picture: run whose records it shows.
RECORDS = {
    "kernel": "mse-kernel",
    "bench": "bench-512-8192",
    "heads": "advise-smollm2-4096",
    "mse": "mse-default",
    "recall": "recall-default",
    "speed": "bench-others",
}
# Computed from the shipped activations alone, by the command of the first page.
SHOWN = "show"


def names() -> list[str]:
    """All pictures."""
    return sorted([*RECORDS, SHOWN])


def sources(name: str) -> Iterator[Path]:
    """Files that decide a picture, drawing code aside."""
    if name in RECORDS:
        yield from (RUNS / RECORDS[name] / file for file in ("records.jsonl", "environment.json"))
    else:
        yield from sorted(DATA.glob("*.safetensors"))


def digest(name: str) -> str:
    """Digest of the sources of a picture."""
    content_hash = hashlib.sha256()
    for path in sources(name):
        content_hash.update(hashlib.sha256(path.read_bytes()).digest())
    return content_hash.hexdigest()


def content(name: str, drawn: Any) -> str:
    """Digest of the texts and the data points of a figure, without ticks."""
    from matplotlib.collections import PathCollection
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

    axes = drawn.get_axes()
    ticks = {
        id(part)
        for panel in axes
        for axis in (panel.xaxis, panel.yaxis)
        for tick in (*axis.majorTicks, *axis.minorTicks)
        for part in tick.findobj()
    }
    shown = [part for part in drawn.findobj() if id(part) not in ticks]
    texts = {" ".join(part.get_text().split()) for part in shown if isinstance(part, Text)}
    points = [part.get_xydata() for part in shown if isinstance(part, Line2D)]
    points += [part.get_offsets() for part in shown if isinstance(part, PathCollection)]
    if name in RECORDS:
        values = {f"{x:.3g} {y:.3g}" for part in points for x, y in part}
    else:
        # Another processor rounds products otherwise, which moves computed numbers in their last digits.
        texts, values = {re.sub(r"[\d.]+", "#", text) for text in texts}, set()
    return hashlib.sha256("\n".join(sorted(texts | values)).encode()).hexdigest()


def figure(name: str) -> Any:
    """The picture as a matplotlib figure."""
    import efficient_attn as ea

    if name == SHOWN:
        return ea.show().plot()
    stored = ea.read(RUNS / RECORDS[name])
    current = runpy.run_path(str(HERE / "choosing.py"))["current"]
    results = ea.Results(current(stored.records), environment=stored.environment)
    return results.plot().figure


def main(chosen: list[str]) -> None:
    """Write pictures and digests."""
    import torch

    from efficient_attn.report.drawing import to_bytes

    # Sums of parallel threads would differ in their last digits.
    torch.set_num_threads(1)
    digests = json.loads(SOURCES.read_text(encoding="utf-8")) if SOURCES.exists() else {}
    for name in chosen or names():
        drawn = figure(name)
        digests[name] = {"records": digest(name), "content": content(name, drawn)}
        (IMAGES / f"{name}.png").write_bytes(to_bytes(drawn, "png", salt=name))
    current = {name: digests[name] for name in names() if name in digests}
    SOURCES.write_text(json.dumps(current, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
