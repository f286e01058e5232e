"""Plan of error measurements: input by input, the baseline of an input first, then the small sizes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from efficient_attn.errors import UnknownNameError
from efficient_attn.options import SEED
from efficient_attn.problem import positive_count
from efficient_attn.runner.record import Record
from efficient_attn.runner.sizes import sized
from efficient_attn.runner.units import parse_sizes
from efficient_attn.runner.variants import Variant, select
from efficient_attn.studies import options as shared
from efficient_attn.studies.model_inputs import Model, Text, sources, those_that_fit
from efficient_attn.studies.points import Plan, Point, in_lists, interleaved
from efficient_attn.studies.study import Option
from efficient_attn.studies.workload import Workload, settle

# Performer's figure 4 (Choromanski et al. 2021): sequences of 4096 tokens, vectors of 16.
_TOKENS, _HEAD_DIM = 4096, 16
_INPUTS = ("gaussian", "encoder", "decoder")

# Operations of the metric per token and entry of a head, in the unit of a backend's own count.
_METRIC = 100

# Key of a run's environment that holds {inputs: median of |x + y|²}.
PAIR_NORMS = "pair_norms"


def plan(
    backends: shared.Backends = None,
    *,
    inputs: Annotated[
        shared.InputNames,
        Option(help=shared.INPUTS_HELP, metavar="NAME[,NAME…]", parse=shared.parse_inputs),
    ] = _INPUTS,
    model: Model = None,
    text: Text = None,
    sizes: shared.Sizes = (16, 32, 64, 128, 256, 512, 1024),
    metric: Annotated[str, Option(help="Metric: relative or mse.", metavar="NAME")] = "relative",
    norms: shared.Norms = (0.5, 1.0),
    draws: Annotated[int | None, Option(help="Number of random-feature draws; 6.", least=1)] = None,
    data_seeds: Annotated[int, Option(help="Number of seeds of Gaussian inputs.", least=1)] = 2,
    seq_len: shared.SeqLen = _TOKENS,
    head_dim: shared.HeadDim = _HEAD_DIM,
    layers: shared.Layers = None,
    options: shared.Settings = None,
    exclude: shared.Exclude = None,
    device: shared.Device = "cpu",
    dtype: shared.Dtype = "auto",
    threads: shared.Threads = None,
    seed: shared.Seed = 0,
) -> Plan:
    """Measure the error of backends against exact softmax attention in float64, size by size.

    The baseline is uniform attention, the mean of the values. Layers that are causal in their model are
    measured causally.

    Example: efficient-attn mse --inputs encoder --backend window,my_file.py:my_attention
    """
    from efficient_attn.runner.accuracy import DRAWS, METRICS
    from efficient_attn.runner.inputs import subjects

    if metric not in METRICS:
        raise UnknownNameError("metric", metric, METRICS)
    count = DRAWS if draws is None else draws
    positive_count("draws", count)
    wanted = parse_sizes(sizes, name="sizes")
    variants = select(backends, options, exclude=exclude)
    workload = settle(Workload(device=device, dtype=dtype, threads=threads))
    given, notes = sources(inputs, model, text, default=_INPUTS)

    def placed(source: Any) -> list[Any]:
        made = subjects(
            [source],
            norms=norms,
            tokens=_TOKENS if seq_len is None else seq_len,
            head_dim=head_dim,
            layers=layers,
            seed=seed,
            data_seeds=data_seeds,
        )
        return [one.placed(dtype=workload.dtype, device=workload.device) for one in made]

    found, left_out = those_that_fit(given, placed, default=_INPUTS)
    chosen = [one for made in found for one in made]
    question = {"metric": metric, "threads": workload.threads or 1}
    return Plan(
        steps=partial(
            in_lists, [list(_points(subject, variants, wanted, count, question)) for subject in chosen]
        ),
        device=workload.device,
        notes=[*notes, *left_out],
        about={PAIR_NORMS: {subject.name: subject.pair_norm for subject in chosen}},
    )


def _points(
    subject: Any, variants: Sequence[Variant], sizes: Sequence[int], draws: int, question: Mapping[str, Any]
) -> Iterator[Point]:
    """The mean of the values, then every variant at its smallest size, then at the next one."""
    from efficient_attn.runner.accuracy import MEAN, at_sizes, error_case, measure_error, measure_mean
    from efficient_attn.runner.counting import known_flops

    def point(variant: Variant, measure: Callable[..., Record]) -> Point:
        case = error_case(variant, subject, "output", threads=question["threads"])
        # The baseline computes the exact output.
        cost = float(case.tokens) ** 2
        if variant is not MEAN:
            operations = known_flops(case, variant.target) or case.tokens**2 * case.model_dim
            metric = _METRIC * case.tokens * case.model_dim
            cost = float(operations + metric) * (draws if SEED in variant.options else 1)
        label, series = f"{case.label} on {case.inputs}", sized(case).series
        return Point(case=case, measure=measure, label=label, series=series, cost=cost)

    yield point(MEAN, partial(measure_mean, subject, **question))
    yield from interleaved(
        [
            point(one, partial(measure_error, one, subject, draws=draws, **question))
            for one in at_sizes(variant, subject, sizes)
        ]
        for variant in variants
    )
