"""Plan of a comparison: errors on all layers, then times and peak memory on one of them."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from efficient_attn.errors import OptionError
from efficient_attn.measure.isolation import DEFAULT_ISOLATION, DEFAULT_TIMEOUT_S
from efficient_attn.measure.variants import YARDSTICK, Variant, select
from efficient_attn.options import positive_number
from efficient_attn.problem import positive_count
from efficient_attn.stats.candidates import CANDIDATES
from efficient_attn.studies import options as shared
from efficient_attn.studies.compare.points import handing_over, steps
from efficient_attn.studies.costs import measurer_for
from efficient_attn.studies.model_inputs import Model, Text, sources, those_that_fit
from efficient_attn.studies.points import Plan
from efficient_attn.studies.study import Option
from efficient_attn.studies.workload import Workload, settle

# Key of a run's environment that holds the error limit.
MAX_ERROR = "max_error"
DEFAULT_MAX_ERROR = 0.1

# Length of Gaussian inputs, which have none of their own.
_TOKENS = 2048
_INPUTS = ("encoder", "decoder")


def plan(
    backends: shared.Backends = None,
    *,
    inputs: Annotated[
        shared.InputNames,
        Option(help=shared.INPUTS_HELP, metavar="NAME[,NAME…]", parse=shared.parse_inputs),
    ] = _INPUTS,
    model: Model = None,
    text: Text = None,
    layer: Annotated[
        int | None,
        Option(help="Index of the only layer; if omitted, errors on all layers, times on one.", least=0),
    ] = None,
    seq_len: shared.SeqLen = None,
    max_error: Annotated[
        float, Option(help="Relative output error of the verdict; 0.1 is 10 %.")
    ] = DEFAULT_MAX_ERROR,
    options: shared.Settings = None,
    exclude: shared.Exclude = None,
    draws: shared.Draws = 4,
    norm: Annotated[float, Option(help="Norm s of Gaussian inputs: q, k ~ N(0, s² I).")] = 1.0,
    causal: shared.Causal = False,
    backward: shared.Backward = False,
    batch: shared.Batch = 1,
    num_heads: Annotated[int, Option(help="Number of heads of Gaussian inputs.", least=1)] = 8,
    head_dim: Annotated[int, Option(help="Head dimension of Gaussian inputs.", least=1)] = 64,
    dtype: shared.Dtype = "float32",
    device: shared.Device = "auto",
    threads: shared.Threads = None,
    rounds: shared.Rounds = 8,
    memory_limit: shared.MemoryLimit = "70%",
    isolate: shared.Isolate = DEFAULT_ISOLATION,
    timeout_s: shared.Timeout = DEFAULT_TIMEOUT_S,
    seed: shared.Seed = 0,
) -> Plan:
    """Compare error, time and memory of backends on the same q, k, v.

    The default selection is exact attention and all backends that approximate softmax. The first tokens of
    the inputs are used; a batch holds copies of them. Layers that are causal in their model are measured
    causally. Errors are measured in the forward pass.

    Example: efficient-attn compare --inputs decoder --backend window,own.py:attend
    """
    positive_number("max_error", max_error)
    positive_count("draws", draws)
    if seq_len is not None:
        positive_count("seq_len", seq_len)
    workload = settle(
        Workload(
            batch=batch,
            num_heads=num_heads,
            head_dim=head_dim,
            causal=causal,
            backward=backward,
            dtype=dtype,
            device=device,
            threads=threads,
            seed=seed,
        )
    )
    chosen = select(backends, options, exclude=exclude, also=True)
    if all(variant.backend != YARDSTICK for variant in chosen):
        chosen = (*select([YARDSTICK]), *chosen)
    given, remarks = sources(inputs, model, text, default=_INPUTS, max_tokens=seq_len)
    make = partial(_subjects, workload=workload, layer=layer, seq_len=seq_len, norm=norm, variants=chosen)
    found, left_out = those_that_fit(given, make, default=_INPUTS)
    names = [subjects[0].name for subjects in found]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise OptionError(f"two inputs are called {min(doubled)!r}; name each once.")
    measurer, limit, notes = measurer_for(
        chosen, workload, isolate=isolate, timeout_s=timeout_s, memory_limit=memory_limit
    )
    return Plan(
        steps=partial(
            steps,
            chosen,
            found,
            workload,
            draws=draws,
            rounds=rounds,
            measurer=measurer,
            limit_bytes=limit,
        ),
        device=workload.device,
        timeout_s=timeout_s,
        notes=[*remarks, *left_out, *notes],
        about={MAX_ERROR: max_error, CANDIDATES: [variant.label for variant in chosen]},
        resources=handing_over(measurer, found),
    )


def _subjects(
    source: Any,
    *,
    workload: Workload,
    layer: int | None,
    seq_len: int | None,
    norm: float,
    variants: Sequence[Variant],
) -> tuple[Any, ...]:
    """The q, k, v of each layer, and a check of the options on them."""
    from efficient_attn.measure.accuracy import try_options
    from efficient_attn.measure.inputs import subjects

    chosen = subjects(
        [source],
        norms=[norm],
        tokens=_TOKENS if seq_len is None else seq_len,
        num_heads=workload.num_heads,
        head_dim=workload.head_dim,
        layers=None if layer is None else [layer],
        seq_len=seq_len,
        seed=workload.seed,
        causal=workload.causal,
    )
    found = tuple(
        one.converted(
            dtype=workload.dtype,
            device=workload.device,
            tokens=seq_len,
            batch=workload.batch,
            causal=workload.causal,
        )
        for one in chosen
    )
    shapes = {(one.causal, *(tensor.shape for tensor in one.activations)) for one in found}
    if len(shapes) > 1:
        name = found[0].name.partition("(")[0]
        raise OptionError(
            f"layers of {name} differ in shape or causality; name one of them: --layer N, layer=N."
        )
    q, k, _ = found[0].activations
    if q.shape[-2] != k.shape[-2]:
        raise OptionError(
            f"inputs {found[0].name} have {q.shape[-2]} queries for {k.shape[-2]} keys; the numbers must be "
            "equal."
        )
    for variant in variants:
        try_options(variant, found[0])
    return found
