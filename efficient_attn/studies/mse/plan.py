"""Plan of error measurements: input by input, the baseline of an input first, then the small sizes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.measure.units import parse_names, parse_sizes
from efficient_attn.measure.variants import Variant, select, sized
from efficient_attn.options import SEED
from efficient_attn.problem import positive_count
from efficient_attn.studies import options as shared
from efficient_attn.studies.study import Option, Plan, Point, in_lists, interleaved
from efficient_attn.studies.workload import Workload, settle

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

# Operations of the metric per token and entry of a head, in the unit of a backend's own count.
_METRIC = 100


def plan(
    backends: shared.Backends = None,
    *,
    figure: Annotated[
        str | None,
        Option(help=f"Settings of a figure in place of all others: {', '.join(FIGURES)}.", metavar="NAME"),
    ] = None,
    inputs: Annotated[
        shared.InputNames,
        Option(
            help=shared.INPUTS_HELP,
            metavar="NAME[,NAME…]",
            parse=lambda text, name: parse_names([text], name=name),
        ),
    ] = ("gaussian", "encoder", "decoder"),
    sizes: shared.Sizes = (16, 32, 64, 128, 256, 512, 1024),
    of: Annotated[
        str, Option(help="Error of the output, or of kernel entries.", metavar="output|kernel")
    ] = "output",
    metric: Annotated[str, Option(help="Metric: relative or mse.", metavar="NAME", rare=True)] = "relative",
    norms: shared.Norms = (0.5, 1.0),
    angles: shared.Angles = (60.0, 90.0, 120.0),
    draws: Annotated[
        int | None, Option(help="Number of random-feature draws; 6, of entries 64.", least=1)
    ] = None,
    seq_lens: Annotated[
        str | int | Sequence[int], shared.worded(shared.SeqLens, "Lengths of Gaussian inputs: 4096 or 1k,4k.")
    ] = (4096,),
    head_dim: shared.HeadDim = 16,
    layers: shared.Layers = None,
    options: shared.Settings = None,
    threads: shared.Threads = None,
    seed: shared.Seed = 0,
) -> Plan:
    """Measure errors against exact attention in float64, size by size.

    Backends compute in float32 on the CPU, layers that are causal in their model causally. An entry of the
    kernel is exp(x·y) for x = q/d^¼ and y = k/d^¼ of a given norm and angle; its error is compared with
    theory.

    Example: efficient-attn mse --inputs encoder --backend window,my_file.py:my_attention
    """
    settings = locals()
    if figure is not None:
        if figure not in FIGURES:
            raise UnknownNameError("figure", figure, FIGURES)
        _refuse_without_effect(settings, settings.keys() - {"figure", "threads", "seed"}, figure)
        return plan(**FIGURES[figure], threads=threads, seed=seed)
    if of not in _NOT_OF:
        raise OptionError(f"of is output or kernel, not {of!r}.")
    _refuse_without_effect(settings, _NOT_OF[of], f"the error of the {of}")
    from efficient_attn.measure.accuracy import DRAWS, MEAN, METRICS, at_sizes
    from efficient_attn.measure.inputs import subjects
    from efficient_attn.studies.mse import kernel

    if metric not in METRICS:
        raise UnknownNameError("metric", metric, METRICS)
    usual = DRAWS if of == "output" else kernel.DRAWS
    count = usual if draws is None else draws
    positive_count("draws", count)
    all_sizes, lengths = parse_sizes(sizes, name="sizes"), parse_sizes(seq_lens, name="seq_lens")
    variants = select(backends, options)
    threads = settle(Workload(device="cpu", threads=threads)).threads
    question: dict[str, Any] = {"draws": count, "threads": threads}
    point: Callable[..., Point]
    if of == "kernel":
        if backends is None:
            variants = tuple(variant for variant in variants if SEED in variant.options)
        vectors = partial(kernel.pairs, head_dim=head_dim, seed=seed)
        chosen = [vectors(norm=norm, angle=angle) for norm in norms for angle in angles]
        point = partial(kernel.entry_point, **question)
    else:
        names = [inputs] if isinstance(inputs, (str, Path)) else list(inputs)
        drawn = partial(subjects, norms=norms, head_dim=head_dim, layers=layers, seed=seed)
        chosen = list(drawn(names, tokens=lengths[0]))
        for tokens in lengths[1:] if "gaussian" in names else ():
            chosen += drawn(["gaussian"], tokens=tokens)
        point = partial(error_point, metric=metric, **question)
    if not chosen:
        raise OptionError("norms and angles must not be empty.")
    lists = []
    for subject in chosen:
        baseline = [point(MEAN, subject)] if of == "output" else []
        lines = [[point(at, subject) for at in at_sizes(x, subject, all_sizes)] for x in variants]
        lists.append([*baseline, *interleaved(lines)])
    return Plan(steps=partial(in_lists, lists))


def _refuse_without_effect(settings: Mapping[str, Any], names: Collection[str], of: str) -> None:
    """Reject options that have another value than their default."""
    for name in sorted(names):
        # The command line has lists in place of tuples.
        value, default = (
            tuple(x) if isinstance(x, list) else x
            for x in (settings[name], signature(plan).parameters[name].default)
        )
        if value != default:
            raise OptionError(f"{name} has no effect on {of}; leave it out.")


def error_point(
    variant: Variant, subject: Any, *, draws: int, metric: str = "relative", threads: int | None = None
) -> Point:
    """Error of a variant, or of uniform attention, on the inputs of a subject."""
    from efficient_attn.measure.accuracy import error_case, measure_error
    from efficient_attn.measure.calls import attention_flops

    case = error_case(variant, subject, "output", threads=threads)
    cost = (
        attention_flops(case, variant.target) or case.tokens**2 * case.model_dim
    ) + _METRIC * case.tokens * case.model_dim
    return Point(
        case=case,
        measure=partial(measure_error, variant, subject, metric=metric, draws=draws, threads=threads),
        label=f"{case.label} on {case.inputs}",
        series=(sized(case).series, "error"),
        cost=float(cost) * (draws if SEED in variant.options else 1),
    )
