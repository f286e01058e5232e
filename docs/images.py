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
from collections.abc import Iterator, Sequence
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
    "floor": "mse-floor",
    "heads": "advise-smollm2-4096",
    "mse": "mse-default",
    "recall": "recall-default",
    "speed": "bench-others",
}
# Cells of docs/examples/after_training.py.
TRAINED = "after-training"
STAGES = ("untrained", "distilled", "scratch")
# Computed from the shipped activations alone, by the command of the first page.
SHOWN = "show"


def names() -> list[str]:
    """All pictures."""
    return sorted([*RECORDS, TRAINED, SHOWN])


def sources(name: str) -> Iterator[Path]:
    """Files that decide a picture, drawing code aside."""
    if name in RECORDS:
        yield from (RUNS / RECORDS[name] / file for file in ("records.jsonl", "environment.json"))
    elif name == TRAINED:
        yield RUNS / TRAINED / "cells.jsonl"
    else:
        yield from sorted(path for path in DATA.glob("*.safetensors") if path.stem != "certified")


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
    if name != SHOWN:
        values = {f"{x:.3g} {y:.3g}" for part in points for x, y in part}
    else:
        # Another processor rounds products otherwise, which moves computed numbers in their last digits.
        texts, values = {re.sub(r"[\d.]+", "#", text) for text in texts}, set()
    return hashlib.sha256("\n".join(sorted(texts | values)).encode()).hexdigest()


def floor(records: Sequence[Any]) -> Any:
    """Errors of weights by layer, between the least ones of rank 256 and uniform attention."""
    from efficient_attn.measure.variants import UNIFORM_ATTENTION, sized
    from efficient_attn.report.figures import UNIFORM_STYLE, Axis, Chart, Plot, Series, line_styles
    from efficient_attn.report.text import show_error
    from efficient_attn.studies.mse.weights_view import STYLES

    names = {sized(record.case).series: record.case.backend for record in records}
    errors: dict[str, list[float]] = {label: [] for label in (*names, *STYLES)}
    least, unbiased = STYLES
    for record in records:
        errors[sized(record.case).series].append(record.weights_relative_error)
        if record.case.backend == "linformer":
            errors[least].append(record.weights_floor)
            errors[unbiased].append(record.weights_unbiased_error)
    lines = {UNIFORM_ATTENTION: UNIFORM_STYLE, unbiased: STYLES[unbiased]}
    lines[least] = {**STYLES[least], "linewidth": 3.5}
    layers = range(len(errors[least]))
    series = []
    del names[UNIFORM_ATTENTION]
    for number, (label, style) in enumerate(line_styles([*names.items()]).items()):
        # Markers of a layer stand side by side.
        places = [layer + 0.8 * ((number + 0.5) / len(names) - 0.5) for layer in layers]
        series.append(Series(label, places, errors[label], {**style, "linestyle": "", "markersize": 6}))
    for label, style in lines.items():
        edges = [layer + side for layer in layers for side in (-0.5, 0.5)]
        series.append(Series(label, edges, [error for error in errors[label] for _ in range(2)], style))
    x = Axis("layer of the encoder", ticks={layer: str(layer) for layer in layers})
    y = Axis("relative error of the weights", "log", show_error)
    text = "512 tokens, 12 heads of 32; m = 256 features; windows have a higher rank"
    return Plot("Error of the attention weights", text, ((Chart(x, y, tuple(series), height=3.4),),))


def after_training() -> Any:
    """Quality of an encoder against speed, and of a decoder by stage: medians over seeds."""
    from efficient_attn.report.figures import Axis, Chart, Plot, Series, line_styles

    cells = runpy.run_path(str(HERE / "record.py"))["cells"]()

    def value(row: str, stage: str, name: str) -> float | None:
        return cells.get((row, stage), {}).get(name)

    rows = dict.fromkeys(row for row, _ in cells)
    styles = line_styles([(row, row.partition("(")[0]) for row in rows])
    quality, bits, arrows = [], [], []
    for row, style in styles.items():
        speed, untrained = value(row, "speed", "4096"), value(row, "encoder untrained", "cosine")
        if untrained is not None:
            quality.append(Series(row, [speed], [untrained], {**style, "linestyle": ""}))
            arrows.append((speed, untrained, value(row, "encoder distilled", "cosine"), style["color"]))
        stages = [value(row, f"decoder {stage}", "bits") for stage in STAGES]
        shown = [(place, y) for place, y in enumerate(stages) if y is not None]
        if shown:
            bits.append(Series(row, *zip(*shown, strict=True), style))

    def draw(ax: Any) -> None:
        """Arrows from untrained to distilled."""
        for speed, start, end, colour in arrows:
            if end is not None:
                line = {"arrowstyle": "-|>", "color": colour, "shrinkA": 4, "shrinkB": 0}
                ax.annotate("", (speed, end), (speed, start), arrowprops=line)

    x = Axis("speed-up at 4096 tokens", "log", "{:g}×".format)
    encoder = Chart(x, Axis("cosine of embeddings"), tuple(quality), "Encoder, arrows: distilled", draw=draw)
    x = Axis(ticks=dict(enumerate(STAGES)))
    decoder = Chart(x, Axis("bits per byte"), tuple(bits), "Language model of bytes")
    return Plot(
        "Untrained, distilled for 2 minutes, trained from scratch",
        "medians of three seeds",
        ((encoder, decoder),),
    )


def figure(name: str) -> Any:
    """The picture as a matplotlib figure."""
    import efficient_attn as ea
    from efficient_attn.report.drawing import draw

    if name == SHOWN:
        return ea.show().plot()
    if name == TRAINED:
        return draw(after_training())[0].figure
    stored = ea.read(RUNS / RECORDS[name])
    if name == "floor":
        return draw(floor(stored.records))[0].figure
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
