"""Plan of an advice: the cheapest and most promising points first, others left out by prediction."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Annotated, Any

from efficient_attn.errors import OptionError
from efficient_attn.measure.isolation import DEFAULT_TIMEOUT_S
from efficient_attn.measure.texts import long_texts, named_texts
from efficient_attn.measure.units import parse_sizes
from efficient_attn.measure.variants import DENSE, MODEL, YARDSTICK, Variant, select
from efficient_attn.options import positive_number
from efficient_attn.problem import positive_count
from efficient_attn.studies import options as shared
from efficient_attn.studies.bench import DEFAULT_MAX_ERROR, MAX_ERROR
from efficient_attn.studies.study import CANDIDATES, Option, Plan
from efficient_attn.studies.swap.plan import DECIDES, KL, OF_A_FOLDER, TextFiles, promising, refuse
from efficient_attn.studies.workload import Workload, measurer_for, settle

# Seconds for the shipped activations; the installation takes about as long.
_BUDGET_S = 60.0
# Seconds for a model.
_MODEL_BUDGET_S = 300.0

_SEQ_LENS = (512, 2048, 8192)
# Lengths of a decoder whose key heads are ranked.
_DECODER_SEQ_LENS = (4096,)

# Targets with their defaults, nats for divergence and loss; recall is a share of exact attention's.
_OF_ATTENTION, _OF_COSINE, _OF_KL = {"max_error": DEFAULT_MAX_ERROR}, {"min_cosine": 0.99}, {"max_kl": 0.05}
_OF_HEADS = {"max_kl": 0.01, "max_loss": 0.01, "min_recall": 0.98}
_TARGETS = {**_OF_ATTENTION, **_OF_COSINE, **_OF_HEADS}

# No target is larger; float64 has no divergence above 745 nats.
_LARGEST = 1e3

# Key of a run's environment that holds the target of a model.
LIMIT = "target"

# Kind of the times that bound all gains: of a model with its own attention, and with uniform attention.
BOUND = "bound"

# Kinds of the rank of key heads and of retrieval, and label of a plan of as many heads drawn by chance.
HEADS, RETRIEVAL, RANDOM_HEADS = "heads", "planted", "random heads"

# Label of the windows in place of the model's sliding layers: of the measurement, and in plans.
LOSSLESS, SLIDING = "window in sliding layers", "sliding window"


def plan(
    model: Annotated[
        Any,
        Option(help=f"{shared.MODEL_HELP} Shipped activations if omitted.", metavar="MODEL", argument=True),
    ] = None,
    backends: shared.Backends = None,
    *,
    texts: TextFiles = None,
    seq_lens: Annotated[
        str | int | Sequence[int] | None, shared.usually(shared.SeqLens, "512,2048,8192")
    ] = None,
    min_cosine: Annotated[
        float | None,
        Option(help="Least cosine with the exact output; 0.99 if omitted.", least=0, most=1),
    ] = None,
    max_kl: Annotated[
        float | None,
        Option(help="Largest divergence of the next token, nats; 0.05 if omitted.", least=0),
    ] = None,
    max_loss: Annotated[
        float | None,
        Option(help="Largest loss of a plan of key heads, nats; 0.01 if omitted.", least=0),
    ] = None,
    min_recall: Annotated[
        float | None,
        Option(help="Least recall of copies, of exact attention; 0.98 if omitted.", least=0, most=1),
    ] = None,
    max_error: Annotated[
        float | None,
        Option(help="Relative output error without a model; 0.1 is 10 %. 0.1 if omitted."),
    ] = None,
    options: shared.Settings = None,
    dtype: Annotated[str | None, shared.usually(shared.Dtype, "float32")] = None,
    device: Annotated[str | None, shared.usually(shared.Device, "auto")] = None,
    threads: shared.Threads = None,
    rounds: shared.Rounds = 4,
    seed: shared.Seed = 0,
) -> Plan:
    """Find the length from which an efficient attention pays, and at what loss.

    Without a model, attention alone on shipped activations decides. With one, as many layers as the target
    allows get the backend that gains most; the plan is verified on other texts, and written to layers.json
    for `attach`.

    Example: efficient-attn advise MODEL --text a.txt --text b.txt --budget 5m
    """
    settings = locals()
    lengths = parse_sizes(_SEQ_LENS if seq_lens is None else seq_lens, name="seq_lens")
    workload = settle(Workload(dtype=dtype or "float32", device=device or "auto", threads=threads, seed=seed))
    variants = _variants(backends, options, model)
    about: dict[str, Any] = {CANDIDATES: [variant.label for variant in variants]}
    if model is None:
        refuse(settings, ("texts",), "without a model")
        # Help texts are shown without numpy.
        from efficient_attn.studies.advise.attention import attention_steps, shipped_layers

        max_error = positive_number("max_error", _targets(settings, _OF_ATTENTION)["max_error"])
        measurer, limit_bytes, notes = measurer_for(variants, workload)
        steps = partial(attention_steps, shipped_layers(workload), variants, lengths, workload)
        return Plan(
            steps=partial(steps, rounds=rounds, measurer=measurer, limit_bytes=limit_bytes),
            device=workload.device,
            notes=notes,
            about={**about, MAX_ERROR: max_error},
            timeout_s=DEFAULT_TIMEOUT_S,
            resources=measurer,
            fixed=(MAX_ERROR, CANDIDATES),
            budget_s=_BUDGET_S,
        )
    positive_count("rounds", rounds)

    from efficient_attn.studies.advise.model import model_steps
    from efficient_attn.studies.swap.called import called_pair, is_called
    from efficient_attn.studies.swap.measure import Subject, candidates, has_copies

    pairs: Sequence[tuple[Subject, Subject]]
    left_out: list[str] = []
    decodes = False
    if is_called(model):
        refuse(settings, OF_A_FOLDER, DECIDES)
        pairs = [called_pair(model, workload)]
        origin = pairs[0][0].about
    else:
        from efficient_attn.integrations.transformers.loading import positions
        from efficient_attn.measure.copies import FEWEST_TOKENS
        from efficient_attn.studies.swap.model import load, ranks_heads, texts_of_lengths

        opened = load(model, workload)
        decodes = backends is None and ranks_heads(opened)
        if decodes and seq_lens is None and (positions(opened) or math.inf) >= max(_DECODER_SEQ_LENS):
            lengths = _DECODER_SEQ_LENS
        long = decodes and texts is None and min(lengths) >= FEWEST_TOKENS
        named = long_texts() if long else named_texts(texts)
        pairs, left_out = texts_of_lengths(opened, named, workload, lengths)
        hashes = {key: sha256(text.encode()).hexdigest() for key, text in named.items()}
        origin = {**opened.about, "texts": hashes}
    first, heads = pairs[0][0], None
    ranked = decodes and any(has_copies(choosing) for choosing, _ in pairs)
    values = _targets(settings, _OF_COSINE if first.loss != KL else _OF_HEADS if ranked else _OF_KL)
    limit = values.pop("max_kl") if first.loss == KL else 1 - values.pop("min_cosine")
    target: dict[str, Any] = {"quantity": first.loss, "limit": limit, **values}
    if ranked:
        from efficient_attn.studies.advise.heads import head_steps
        from efficient_attn.studies.advise.outcomes import Targets

        heads = partial(head_steps, targets=Targets.of({LIMIT: target}), rounds=rounds)
    fitted = candidates(variants, first)
    steps = partial(model_steps, pairs, fitted, quantity=first.loss, limit=limit, rounds=rounds)
    return Plan(
        steps=partial(steps, heads=heads),
        device=first.shared["device"],
        notes=[*first.notes, *left_out],
        about={**about, MODEL: origin, LIMIT: target},
        fixed=(LIMIT, CANDIDATES),
        budget_s=_MODEL_BUDGET_S,
    )


def _targets(settings: Mapping[str, Any], defaults: Mapping[str, float]) -> dict[str, float]:
    """The targets that apply, by their names."""
    refuse(settings, [name for name in _TARGETS if name not in defaults], f"here; use {', '.join(defaults)}")
    values = {name: settings[name] for name in defaults if settings[name] is not None}
    for name, value in values.items():
        most = 1.0 if name.startswith("min_") else _LARGEST
        if not isinstance(value, (int, float)) or not 0 <= value <= most:
            raise OptionError(f"{name} is a number from 0 to {most:g}, not {value!r}.")
    return {**defaults, **values}


def _variants(backends: Any, options: Any, model: Any) -> tuple[Variant, ...]:
    """Exact attention, then the most promising variants; no score matrices in a model unasked."""
    chosen = select(backends, options, also=True)
    if backends is None:
        # Loss hides that a window loses recall, which no target here measures.
        near = [variant for variant in chosen if not variant.options.get("global_tokens")]
        near = [variant for variant in near if model is None or variant.backend != DENSE]
        chosen = tuple(sorted(near, key=promising))
    exact = [variant for variant in chosen if variant.backend == YARDSTICK] or select([YARDSTICK])
    return (*exact, *(variant for variant in chosen if variant.backend != YARDSTICK))
