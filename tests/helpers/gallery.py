"""Every plot at its extremes. `python tests/helpers/gallery.py FOLDER` writes them to look at."""

import sys
from pathlib import Path

import numpy as np
from synthetic_records import case, costs

import efficient_attn as ea
from efficient_attn.backends import list_backends
from efficient_attn.measure.record import Record, replace
from efficient_attn.measure.variants import UNIFORM_ATTENTION
from efficient_attn.report.drawing import draw, to_bytes
from efficient_attn.tools.show import Shown, WeightsMap

TWENTY = [*list_backends(), "my_attention", "fast.py:attention", "window(global_tokens=4)"]
LENGTHS = (256, 512, 1024, 2048)


def output_error(label, tokens, error, *, inputs="encoder(layer=0)", size=None):
    options = {} if size is None else {"num_features": size}
    name = label if size is None else f"{label}(num_features={size})"
    about = case("error", name, tokens, of="output", inputs=inputs, options=options)
    return Record(case=about, output_relative_error=error, output_relative_error_draws=(error,) * 6)


def entry_error(label, size, norm, angle, error, expected):
    options = {"num_features": size, "projection": "orthogonal"}
    about = case("error", f"{label}(num_features={size})", 64, options=options, num_heads=1, head_dim=16)
    about = replace(about, of="kernel", inputs=f"pair(norm={norm:g}, angle={angle:g})")
    draws = tuple(error * (1 + step / 10) for step in (-1, 0, 1))
    return Record(
        case=about,
        kernel_value=1.0,
        kernel_mse=error,
        kernel_mse_draws=draws,
        expected_kernel_mse=expected,
    )


def bench(labels, lengths, errors):
    points = [output_error(x, lengths[0], error) for x, error in zip(labels, errors, strict=True)]
    return [output_error(UNIFORM_ATTENTION, lengths[0], 0.7), *points, *costs(labels, lengths)]


def mse(labels, sizes, errors):
    shown = [output_error(UNIFORM_ATTENTION, 512, 0.7)]
    for label, error in zip(labels, errors, strict=True):
        shown += [output_error(label, 512, error / (place + 1), size=x) for place, x in enumerate(sizes)]
    return shown


def entries(labels, sizes, norms, angles, spread):
    values = np.geomspace(1.0, 1.0 / spread, len(angles))
    return [
        entry_error(label, size, norm, angle, value / size, value / size)
        for norm in norms
        for label in labels
        for size in sizes
        for angle, value in zip(angles, values, strict=True)
    ]


def recall(labels, sizes):
    shown = []
    for place, label in enumerate(labels):
        for size in sizes:
            about = case("recall", f"{label}(rank={size})", 64, inputs="pairs(16)", options={"rank": size})
            measured = {"accuracy": (place + 1) / (len(labels) + 1), "floats_read": size * (place + 1)}
            shown.append(Record(case=about, chance=0.06, **measured))
    return shown


def records():
    """Records by the name of the extreme."""
    decades = [*np.geomspace(1e-7, 1.0, 8)]
    maps = ["performer-positive", "performer-trig", "performer-hyperbolic"]
    failed = [
        replace(x, status="error", reason="out of memory", times_s=None, round_sizes=None, peak_bytes=None)
        for x in costs(("exact", "window"))
    ]
    return {
        "bench-point": bench(["exact", "window"], LENGTHS[:1], [1e-7, 0.5]),
        "bench-decades": bench(["exact", *TWENTY[2:9]], LENGTHS, decades),
        "bench-one": bench(["exact", "window"], LENGTHS, [1e-7, 1e5]),
        "bench-twenty": bench(["exact", *TWENTY[2:21]], LENGTHS, [1e-7, *np.geomspace(0.01, 2, 19)]),
        "bench-failed": failed,
        "mse-point": mse(["window"], [16], [0.5]),
        "mse-decades": mse(maps, [16, 64, 256], [1e7, 3.0, 1e-3]),
        "mse-exact": mse(["window", "linformer"], [16, 64], [0.5, 1e-9]),
        "mse-twenty": mse(TWENTY[:20], [16, 64, 256], [*np.geomspace(0.01, 2, 20)]),
        "kernel-point": entries(maps[:1], [64], [1.0], [60.0], 1.0),
        "kernel-decades": entries(maps, [16, 64, 256, 1024], [0.25, 0.5, 1.5], [30.0, 90.0, 150.0], 1e7),
        "kernel-sizes": entries(maps, [16, 64, 256], [1.0], [60.0], 1.0),
        "recall-point": recall(["linformer"], [16]),
        "recall-twenty": recall(TWENTY[:20], [16, 32]),
    }


def plots():
    """Plots by a name."""
    shown = {}
    for name, group in records().items():
        study = name.partition("-")[0].replace("kernel", "mse")
        results = ea.Results(group, environment={"study": study})
        shown |= {f"{name}-{plot}": x for plot, x in results.plots().items()}
    return shown


def figures():
    """Figures by a name: of every plot that is not empty, and heat maps of one word and of many."""
    drawn = {name: draw(plot)[0].figure for name, plot in plots().items() if not plot.is_empty}
    weights = np.linspace(-1, 1, 32 * 32).reshape(32, 32)
    words = tuple(f"word{place}" * (1 + place % 3) for place in range(32))
    for count, labels in ((1, TWENTY[:1]), (32, TWENTY[:9])):
        maps = tuple(WeightsMap(label, weights[:count, :count], 0.5) for label in labels)
        title = "Attention weights: encoder, layer 0, head 2; 512 keys"
        drawn[f"show-{count}"] = Shown(maps=maps, words=words[:count], title=title).plot()
    return drawn


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures().items():
        (folder / f"{name}.png").write_bytes(to_bytes(figure, "png", salt=name))
