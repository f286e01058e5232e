"""Plan of error measurements: input by input, the baseline of an input first, then the small sizes."""

from collections.abc import Iterator, Mapping, Sequence
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

# Performer's figure 4 (Choromanski et al. 2021): sequences of 4096 tokens, vectors of 16.
_LENGTHS, _HEAD_DIM = (4096,), 16
_INPUTS = ("gaussian", "encoder", "decoder")

_ANGLES = (60.0, 90.0, 120.0)

# Options that the error of kernel entries does not have.
_OF_THE_OUTPUT = ("inputs", "metric", "seeds", "seq_lens", "layers", "device", "dtype")

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
    ] = _INPUTS,
    sizes: shared.Sizes = (16, 32, 64, 128, 256, 512, 1024),
    of: Annotated[
        str, Option(help="Error of the output, or of kernel entries.", metavar="output|kernel")
    ] = "output",
    metric: Annotated[str, Option(help="Metric: relative or mse.", metavar="NAME", rare=True)] = "relative",
    norms: shared.Norms = (0.5, 1.0),
    angles: Annotated[Sequence[float] | None, shared.usually(shared.Angles, "60,90,120")] = None,
    draws: Annotated[
        int | None, Option(help="Number of random-feature draws; 6, of entries 64.", least=1)
    ] = None,
    seeds: Annotated[int, Option(help="Number of seeds of Gaussian inputs.", least=1, rare=True)] = 2,
    seq_lens: Annotated[
        str | int | Sequence[int], shared.worded(shared.SeqLens, "Lengths of Gaussian inputs: 4096 or 1k,4k.")
    ] = _LENGTHS,
    head_dim: shared.HeadDim = _HEAD_DIM,
    layers: shared.Layers = None,
    options: shared.Settings = None,
    device: Annotated[str, shared.rarely(shared.Device)] = "cpu",
    dtype: Annotated[str, shared.rarely(shared.Dtype)] = "auto",
    threads: shared.Threads = None,
    seed: shared.Seed = 0,
) -> Plan:
    """Measure errors against exact attention in float64, size by size.

    Layers that are causal in their model are measured causally. An entry of the kernel is exp(x·y) for
    x = q/d^¼ and y = k/d^¼ of a given norm and angle; its error is compared with theory.

    Example: efficient-attn mse --inputs encoder --backend window,my_file.py:my_attention
    """
    settings = locals()
    if figure is not None:
        return _plan_of_figure(settings)
    if of not in ("output", "kernel"):
        raise OptionError(f"of is output or kernel, not {of!r}.")
    _refuse_without_effect(
        settings, ("angles",) if of == "output" else _OF_THE_OUTPUT, f"the error of the {of}"
    )
    if of == "kernel":
        return _kernel_plan(settings)
    from efficient_attn.measure.accuracy import DRAWS, METRICS
    from efficient_attn.measure.inputs import subjects

    if metric not in METRICS:
        raise UnknownNameError("metric", metric, METRICS)
    count = DRAWS if draws is None else draws
    positive_count("draws", count)
    all_sizes = parse_sizes(sizes, name="sizes")
    variants = select(backends, options)
    workload = settle(Workload(device=device, dtype=dtype, threads=threads))
    named = [inputs] if isinstance(inputs, (str, Path)) else list(inputs)

    positive_count("seeds", seeds)
    drawn = partial(subjects, norms=norms, head_dim=head_dim, layers=layers, seed=seed, data_seeds=seeds)
    lengths = parse_sizes(seq_lens, name="seq_lens")
    chosen: list[Any] = []
    left_out = []
    for source in named:
        try:
            for tokens in lengths if source == "gaussian" else lengths[:1]:
                chosen += drawn([source], tokens=tokens)
        except OptionError as reason:
            if list(named) != list(_INPUTS):
                raise
            left_out.append(f"Left out: {reason}")
    if not chosen:
        raise OptionError(" ".join(left_out) or "inputs must not be empty.")
    chosen = [subject.converted(dtype=workload.dtype, device=workload.device) for subject in chosen]
    question = {"metric": metric, "threads": workload.threads or 1}
    return Plan(
        steps=partial(
            in_lists, [list(_points(subject, variants, all_sizes, count, question)) for subject in chosen]
        ),
        device=workload.device,
        notes=left_out,
    )


def _plan_of_figure(settings: Mapping[str, Any]) -> Plan:
    """The plan with the settings of a figure; other settings but those of the run are refused."""
    figure = settings["figure"]
    if figure not in FIGURES:
        raise UnknownNameError("figure", figure, FIGURES)
    shared_settings = {name: settings[name] for name in ("device", "dtype", "threads", "seed")}
    _refuse_without_effect(
        settings, [name for name in settings if name not in (*shared_settings, "figure")], figure
    )
    return plan(**FIGURES[figure], **shared_settings)


def _refuse_without_effect(settings: Mapping[str, Any], names: Sequence[str], of: str) -> None:
    """Reject options of the other error that have another value than their default."""
    for name in names:
        # The command line has lists in place of tuples.
        value, default = (
            tuple(x) if isinstance(x, list) else x
            for x in (settings[name], signature(plan).parameters[name].default)
        )
        if value != default:
            raise OptionError(f"{name} has no effect on {of}; leave it out.")


def _kernel_plan(settings: Mapping[str, Any]) -> Plan:
    """Entries of the kernel, of all random features unless backends are named."""
    from efficient_attn.studies.mse.kernel import DRAWS, entry_points, pair_subjects

    draws = DRAWS if settings["draws"] is None else settings["draws"]
    positive_count("draws", draws)
    variants = select(settings["backends"], settings["options"])
    if settings["backends"] is None:
        variants = tuple(variant for variant in variants if SEED in variant.options)
    sizes = parse_sizes(settings["sizes"], name="sizes")
    angles = _ANGLES if settings["angles"] is None else settings["angles"]
    threads = settle(Workload(device="cpu", threads=settings["threads"])).threads or 1
    pairs = pair_subjects(settings["norms"], angles, head_dim=settings["head_dim"], seed=settings["seed"])
    lists = [
        interleaved(entry_points(pair, variant, sizes, draws, threads) for variant in variants)
        for pair in pairs
    ]
    return Plan(steps=partial(in_lists, lists))


def _points(
    subject: Any, variants: Sequence[Variant], sizes: Sequence[int], draws: int, question: Mapping[str, Any]
) -> Iterator[Point]:
    """The mean of the values, then every variant at its smallest size, then at the next one."""
    from efficient_attn.measure.accuracy import MEAN, at_sizes

    yield error_point(MEAN, subject, draws=draws, **question)
    yield from interleaved(
        [
            error_point(candidate, subject, draws=draws, **question)
            for candidate in at_sizes(variant, subject, sizes)
        ]
        for variant in variants
    )


def error_point(
    variant: Variant, subject: Any, *, draws: int, metric: str = "relative", threads: int | None = None
) -> Point:
    """Error of a variant, or of uniform attention, on the inputs of a subject."""
    from efficient_attn.measure.accuracy import MEAN, error_case, measure_error, measure_mean
    from efficient_attn.measure.calls import attention_flops

    case = error_case(variant, subject, "output", threads=threads)
    question: dict[str, Any] = {"metric": metric, "threads": threads}
    if variant is MEAN:
        # The baseline computes the exact output, in float64.
        cost = float(case.tokens) ** 2 * case.model_dim
        measure = partial(measure_mean, subject, **question)
    else:
        operations = attention_flops(case, variant.target) or case.tokens**2 * case.model_dim
        compared = _METRIC * case.tokens * case.model_dim
        cost = float(operations + compared) * (draws if SEED in variant.options else 1)
        measure = partial(measure_error, variant, subject, draws=draws, **question)
    label, series = f"{case.label} on {case.inputs}", (sized(case).series, "error")
    return Point(case=case, measure=measure, label=label, series=series, cost=cost)
