"""Error of backends against exact softmax attention, or of features at kernel entries, size by size."""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.measure.record import Record
from efficient_attn.measure.units import parse_names, parse_sizes
from efficient_attn.measure.variants import select
from efficient_attn.options import SEED, option
from efficient_attn.problem import positive_count
from efficient_attn.report.figures import Plot
from efficient_attn.report.table import Table
from efficient_attn.runs import shared_options as shared
from efficient_attn.runs.study import Point, Points, Run, Settled, Study, interleaved
from efficient_attn.runs.workload import Workload, settle

# Options without an effect on an error.
_NOT_OF = {"output": ("angles",), "kernel": ("inputs", "metric", "seq_lens", "layers")}

# Settings of figures of Choromanski et al. 2021, with fewer norms and angles.
_MAPS = ("performer-trig", "performer-positive")
FIGURES: dict[str, dict[str, Any]] = {
    "performer-fig2": {
        "of": "kernel",
        "backends": _MAPS,
        "options": {name: {"projection": ["iid"]} for name in _MAPS},
        "sizes": (64, 256),
        "norms": (0.25, 0.5, 1.0, 1.5),
        "angles": (30.0, 60.0, 90.0, 120.0, 150.0),
        "draws": 64,
    },
    "performer-fig4": {
        "inputs": ("gaussian",),
        "backends": _MAPS,
        "options": {name: {"projection": ["orthogonal", "iid"]} for name in _MAPS},
        "sizes": (16, 32, 64, 128, 256),
        "metric": "mse",
        "draws": 15,
    },
}


@dataclass(frozen=True, eq=False)
class Mse(Study):
    """Measure errors against exact attention in float64, size by size.

    Backends compute in float32 on the CPU, layers that are causal in their model causally. An entry of the
    kernel is exp(x·y) for x = q/d^¼ and y = k/d^¼ of a given norm and angle; its error is compared with
    theory.

    Example: efficient-attn mse --inputs encoder --backend window,my_file.py:my_attention
    """

    kinds = ("error",)
    budget_s = 300.0

    backends: shared.Backends = shared.backends()
    _: KW_ONLY
    figure: str | None = option(
        None, f"Settings of a figure in place of all others: {', '.join(FIGURES)}.", metavar="NAME"
    )
    inputs: shared.InputNames = option(
        ("gaussian", "encoder", "decoder"),
        shared.INPUTS_HELP,
        metavar="NAME[,NAME…]",
        parse=lambda text, name: parse_names([text], name=name),
        free=True,
    )
    sizes: shared.Sizes = shared.sizes((16, 32, 64, 128, 256, 512, 1024))
    of: str = option("output", "Error of the output, or of kernel entries.", metavar="output|kernel")
    metric: str = option("relative", "Metric: relative or mse.", metavar="NAME", rare=True)
    norms: Sequence[float] = option(
        (0.5, 1.0),
        "Standard deviations of Gaussian q, k; |q|/d^¼ of entries.",
        flag="--norm",
        metavar="NORM[,NORM…]",
        parse=shared.parse_numbers("finite numbers above 0, such as 0.5,1", lambda x: 0 < x < math.inf),
        free=True,
    )
    angles: Sequence[float] = option(
        (60.0, 90.0, 120.0),
        "Angles between query and key in degrees, 0 to 180.",
        flag="--angle",
        metavar="DEG[,DEG…]",
        rare=True,
        parse=shared.parse_numbers("degrees from 0 to 180, such as 60,90", lambda angle: 0 <= angle <= 180),
        free=True,
    )
    draws: int | None = shared.draws(None, "Number of random-feature draws; 6, of entries 64.")
    seq_lens: shared.Sizes = shared.seq_lens((4096,), "Lengths of Gaussian inputs: 4096 or 1k,4k.")
    head_dim: int = shared.head_dim(16)
    layers: Sequence[int] | None = shared.layers()
    options: shared.Settings = shared.settings()
    threads: int | None = shared.threads()
    seed: int = shared.seed()

    def check(self) -> None:
        if self.figure is not None:
            if self.figure not in FIGURES:
                raise UnknownNameError("figure", self.figure, FIGURES)
            further = [item.name for item in fields(self) if item.name not in ("figure", "threads", "seed")]
            self.refuse(*further, reason=f"on {self.figure}; leave it out")
        if self.of not in _NOT_OF:
            raise OptionError(f"of is output or kernel, not {self.of!r}.")
        self.refuse(*_NOT_OF[self.of], reason=f"on the error of the {self.of}; leave it out")
        if self.draws is not None:
            positive_count("draws", self.draws)
        parse_sizes(self.sizes, name="sizes")
        parse_sizes(self.seq_lens, name="seq_lens")

    def settle(self) -> Settled:
        # Inputs are loaded, and refused, before a folder is made.
        return Settled(candidates=tuple({point.case.label: None for x in self._lists for point in x}))

    def points(self) -> Points:
        """Input by input, the baseline of an input first, then the small sizes."""
        for points in self._lists:  # noqa: UP028  (records are sent to a generator, not to an iterator)
            yield points

    def tables(self, records: Sequence[Record], run: Run[Settled]) -> list[Table]:
        from efficient_attn.studies.mse.view import tables

        return tables(records)

    def sentences(self, records: Sequence[Record], run: Run[Settled]) -> list[str]:
        from efficient_attn.studies.mse.view import sentences

        return sentences(records)

    def plots(self, records: Sequence[Record], run: Run[Settled]) -> dict[str, Plot]:
        from efficient_attn.studies.mse.view import plots

        return plots(records)

    @cached_property
    def _lists(self) -> list[list[Point]]:
        """The points of each input."""
        if self.figure is not None:
            return Mse(**FIGURES[self.figure], threads=self.threads, seed=self.seed)._lists
        from efficient_attn.measure.accuracy import DRAWS, MEAN, METRICS, at_sizes
        from efficient_attn.measure.inputs import subjects
        from efficient_attn.studies.mse import kernel
        from efficient_attn.studies.mse.points import error_point

        if self.metric not in METRICS:
            raise UnknownNameError("metric", self.metric, METRICS)
        usual = DRAWS if self.of == "output" else kernel.DRAWS
        sizes, lengths = parse_sizes(self.sizes, name="sizes"), parse_sizes(self.seq_lens, name="seq_lens")
        variants = select(self.backends, self.options)
        threads = settle(Workload(device="cpu", threads=self.threads), timed=False).threads
        question: dict[str, Any] = {"draws": self.draws or usual, "threads": threads}
        point: Callable[..., Point]
        if self.of == "kernel":
            if self.backends is None:
                variants = tuple(variant for variant in variants if SEED in variant.options)
            vectors = partial(kernel.pairs, head_dim=self.head_dim, seed=self.seed)
            chosen = [vectors(norm=norm, angle=angle) for norm in self.norms for angle in self.angles]
            point = partial(kernel.entry_point, **question)
        else:
            names = [self.inputs] if isinstance(self.inputs, (str, Path)) else list(self.inputs)
            drawn = partial(
                subjects, norms=self.norms, head_dim=self.head_dim, layers=self.layers, seed=self.seed
            )
            chosen = list(drawn(names, tokens=lengths[0]))
            for tokens in lengths[1:] if "gaussian" in names else ():
                chosen += drawn(["gaussian"], tokens=tokens)
            point = partial(error_point, metric=self.metric, **question)
        if not chosen:
            raise OptionError("norms and angles must not be empty.")
        lists = []
        for subject in chosen:
            baseline = [point(MEAN, subject)] if self.of == "output" else []
            lines = [[point(at, subject) for at in at_sizes(x, subject, sizes)] for x in variants]
            lists.append([*baseline, *interleaved(lines)])
        return lists
