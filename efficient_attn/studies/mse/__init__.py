"""Error of backends against exact softmax attention: of outputs, weights or kernel entries, size by size."""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.measure.units import parse_names, parse_sizes
from efficient_attn.measure.variants import Variant, select, sized
from efficient_attn.options import SEED, one_of, option
from efficient_attn.problem import positive_count
from efficient_attn.runs import shared_options as shared
from efficient_attn.runs.study import Point, Points, Settled, Study
from efficient_attn.runs.workload import Workload, settle

# Options without an effect on an error.
_NOT_OF = {
    "output": ("angles",),
    "kernel": ("inputs", "metric", "column", "seq_lens", "layers"),
    "weights": ("angles", "metric"),
}

# Lengths of Gaussian inputs.
_TOKENS = (4096,)

# Operations of the metric per token and entry of a head, in the unit of a backend's own count.
_METRIC = 100

# Sizes of an output's error; kernel entries have sizes of their own.
_SIZES: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)

# Further variants of outputs where no backend is named.
_FIXED_NORMS = {name: {"norms": ["fixed"]} for name in ("performer-positive", "performer-full")}

# Settings of figures of Choromanski et al. 2021, with fewer norms and angles.
_MAPS = ("performer-trig", "performer-positive")
FIGURES: dict[str, dict[str, Any]] = {
    "performer-fig2": {
        "of": "kernel",
        "backends": _MAPS,
        "options": {name: {"projection": ["iid", "orthogonal"]} for name in _MAPS},
        "sizes": (256,),
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
    """Measure errors (MSE) by number of random features, rank or window.

    Errors of outputs are relative, √(MSE / mean square), against float64; backends run in float32 on the CPU,
    decoder layers with a causal mask. With --of kernel, errors of random features at single entries exp(x·y)
    of the softmax kernel, x = q/d^¼ and y = k/d^¼, are compared with their closed forms. With --of weights,
    errors of the attention weights of the first 512 tokens are compared with the least ones of their rank.

    Example: efficient-attn mse --inputs encoder --backend window,my_file.py:my_attention
    """

    kinds = ("error",)
    views = "efficient_attn.studies.mse.view"
    budget_s = 300.0

    backends: shared.Backends = shared.backends()
    _: KW_ONLY
    figure: str | None = option(
        None, f"Reproduce a figure of the paper; no other options: {', '.join(FIGURES)}.", metavar="NAME"
    )
    inputs: str | Path | Sequence[str | Path] = option(
        ("gaussian", "encoder", "decoder"),
        "encoder (512 tokens), decoder (4096, causal), gaussian, or FILE.safetensors.",
        metavar="NAME[,NAME…]",
        parse=lambda text, name: parse_names([text], name=name),
        free=True,
    )
    sizes: shared.Sizes | None = shared.sizes(None, "16:1024:x2, with --of kernel 64,256,")
    of: str = option(
        "output",
        "Error of the output, of kernel entries, or of attention weights.",
        metavar="output|kernel|weights",
    )
    metric: str = option("relative", "Error of the output: relative or mse.", metavar="NAME")
    column: str = option("mse", "Last column of the table: mse or corr.", metavar="mse|corr", free=True)
    norms: Sequence[float] = option(
        (0.5, 1.0),
        "Std of Gaussian q and k; with --of kernel the norm of x and y.",
        flag="--norm",
        metavar="NORM[,NORM…]",
        parse=shared.parse_numbers("finite numbers above 0, such as 0.5,1", lambda x: 0 < x < math.inf),
        free=True,
    )
    angles: Sequence[float] = option(
        (30.0, 60.0, 90.0, 120.0, 150.0),
        "With --of kernel: angles between x and y in degrees.",
        flag="--angle",
        metavar="DEG[,DEG…]",
        parse=shared.parse_numbers("degrees from 0 to 180, such as 60,90", lambda angle: 0 <= angle <= 180),
        free=True,
    )
    draws: int | None = option(
        None, "Random-feature draws per point; 6, --of kernel 64, if omitted.", least=1
    )
    seq_lens: shared.Sizes = shared.seq_lens(_TOKENS, "Lengths of Gaussian inputs: 4096 or 1k,4k.")
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
            raise OptionError(f"of is output, kernel or weights, not {self.of!r}.")
        self.refuse(*_NOT_OF[self.of], reason=f"on the error of the {self.of}; leave it out")
        one_of("column", self.column, ("mse", "corr"))
        if self.draws is not None:
            positive_count("draws", self.draws)
        if self.sizes is not None:
            parse_sizes(self.sizes, name="sizes")
        parse_sizes(self.seq_lens, name="seq_lens")

    def settle(self) -> Settled:
        # Inputs are loaded, and refused, before a folder is made.
        return Settled(candidates=tuple({point.case.label: None for x in self._lists for point in x}))

    def points(self) -> Points:
        """Input by input, the baseline of an input first, then the small sizes."""
        for points in self._lists:  # noqa: UP028  (records are sent to a generator, not to an iterator)
            yield points

    @cached_property
    def _lists(self) -> list[list[Point]]:
        """The points of each input."""
        if self.figure is not None:
            return Mse(**FIGURES[self.figure], threads=self.threads, seed=self.seed)._lists
        from efficient_attn.measure.accuracy import DRAWS, MEAN, METRICS, WEIGHTED_TOKENS, at_sizes
        from efficient_attn.measure.inputs import subjects
        from efficient_attn.studies.mse import kernel
        from efficient_attn.theory.kernel import KINDS

        if self.metric not in METRICS:
            raise UnknownNameError("metric", self.metric, METRICS)
        entries = self.of == "kernel"
        usual, usual_sizes = (kernel.DRAWS, kernel.SIZES) if entries else (DRAWS, _SIZES)
        lengths = parse_sizes(self.seq_lens, name="seq_lens")
        if self.of == "weights":
            usual_sizes = _SIZES[:-1]
            lengths = (WEIGHTED_TOKENS,) if lengths == _TOKENS else lengths
            if max(lengths) > WEIGHTED_TOKENS:
                raise OptionError(f"seq_lens of weights is at most {WEIGHTED_TOKENS}, not {max(lengths)}.")
        sizes = parse_sizes(usual_sizes if self.sizes is None else self.sizes, name="sizes")
        variants = select(self.backends, self.options, usual=[*KINDS] if entries else None)
        if self.backends is None and not self.options and not entries:
            variants += select([*_FIXED_NORMS], _FIXED_NORMS)
        threads = settle(Workload(device="cpu", threads=self.threads), timed=False).threads
        question: dict[str, Any] = {"draws": self.draws or usual, "threads": threads}
        point: Callable[..., Point]
        if entries:
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
            if self.of == "weights":
                chosen = [subject.with_unit_values(WEIGHTED_TOKENS) for subject in chosen]
            point = partial(self._error_point, **question)
        if not chosen:
            raise OptionError("norms and angles must not be empty.")
        lists = []
        for subject in chosen:
            baseline = [] if entries else [point(MEAN, subject)]
            lines = [[point(at, subject) for at in at_sizes(x, subject, sizes)] for x in variants]
            # First points of all lines, then second ones, each case once.
            rows = zip_longest(*lines)
            points = {x.case.key: x for row in rows for x in row if x is not None}
            lists.append([*baseline, *points.values()])
        return lists

    def _error_point(self, variant: Variant, subject: Any, *, draws: int, threads: int | None) -> Point:
        """Error of a variant, or of uniform attention, on the inputs of a subject."""
        from efficient_attn.measure.accuracy import error_case, measure_error
        from efficient_attn.measure.calls import attention_flops

        case = error_case(variant, subject, self.of, threads=threads)
        flops = attention_flops(case, variant.target) or case.tokens**2 * case.model_dim
        # Operations are counted for values of the head dimension.
        width = subject.activations.v.shape[-1] / case.head_dim
        cost = width * (flops + _METRIC * case.tokens * case.model_dim)
        return Point(
            case=case,
            measure=partial(
                measure_error, variant, subject, metric=self.metric, of=self.of, draws=draws, threads=threads
            ),
            label=f"{case.label} on {case.inputs}",
            series=(sized(case).series, "error"),
            cost=cost * (draws if SEED in variant.options else 1),
        )
