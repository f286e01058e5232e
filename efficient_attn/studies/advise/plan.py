"""Plan of an advice: the cheapest and most promising points first, others left out by prediction."""

import inspect
import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from efficient_attn.errors import DataError, OptionError
from efficient_attn.measure.texts import named_texts
from efficient_attn.modules.options import positive_number
from efficient_attn.problem import positive_count
from efficient_attn.report.escape import short
from efficient_attn.runner.isolation import DEFAULT_ISOLATION, DEFAULT_TIMEOUT_S
from efficient_attn.runner.sizes import MODEL
from efficient_attn.runner.units import parse_sizes
from efficient_attn.runner.variants import DENSE, YARDSTICK, Variant, select
from efficient_attn.stats.candidates import CANDIDATES
from efficient_attn.studies import options as shared
from efficient_attn.studies.compare.plan import DEFAULT_MAX_ERROR, MAX_ERROR
from efficient_attn.studies.costs import measurer_for
from efficient_attn.studies.plan import Plan
from efficient_attn.studies.study import Option
from efficient_attn.studies.swap.plan import TextFiles, promising
from efficient_attn.studies.workload import Workload, settle

# Seconds for the shipped activations: with the installation less than two minutes.
_BUDGET_S = 60.0
# Seconds for a model.
_MODEL_BUDGET_S = 300.0

# Options that only a model uses, only a folder, or only attention alone.
_OF_A_MODEL = ("texts", "tokenizer", "min_cosine", "max_kl", "name")
_OF_A_FOLDER = ("texts", "tokenizer", "dtype", "device", "memory_limit")
_OF_ATTENTION = ("max_error", "draws", "causal", "isolate", "timeout_s")

# A divergence beyond this many nats is no target; float64 has none above 745.
_MOST_KL = 1e3

# Key of a run's environment that holds the target of a model.
LIMIT = "target"


def plan(
    model: Annotated[
        Any,
        Option(
            help=f"{shared.MODEL_HELP} Shipped activations if omitted.",
            metavar="MODEL",
            parse=shared.parse_text,
            argument=True,
        ),
    ] = None,
    backends: shared.Backends = None,
    *,
    texts: TextFiles = None,
    tokenizer: Any = None,
    seq_lens: shared.SeqLens = (512, 2048, 8192),
    min_cosine: Annotated[
        float,
        Option(
            help="Least cosine with the exact output, or with an encoder's exact embeddings.", least=0, most=1
        ),
    ] = 0.99,
    max_kl: Annotated[
        float, Option(help="Largest divergence of a causal model's next token, nats.", least=0)
    ] = 0.05,
    max_error: Annotated[
        float, Option(help="Relative output error without a model; 0.1 is 10 %.")
    ] = DEFAULT_MAX_ERROR,
    options: shared.Settings = None,
    exclude: shared.Exclude = None,
    draws: shared.Draws = 2,
    causal: shared.Causal = False,
    dtype: shared.Dtype = "float32",
    device: shared.Device = "auto",
    threads: shared.Threads = None,
    rounds: shared.Rounds = 4,
    memory_limit: shared.MemoryLimit = "70%",
    isolate: shared.Isolate = DEFAULT_ISOLATION,
    timeout_s: shared.Timeout = DEFAULT_TIMEOUT_S,
    name: Annotated[str | None, Option(help="Name of the model in records; the folder's if omitted.")] = None,
    seed: shared.Seed = 0,
) -> Plan:
    """Find the length from which an efficient attention pays, and at what loss.

    Without a model the shipped activations of a real encoder and of a real decoder decide, attention alone:
    errors at their lengths, times at all lengths. With a model each layer gets the backend that
    gains most within the target; the plan is verified end to end on texts that did not choose it, and
    written to layers.json for `attach` and `load`. Predicted times leave out backends that would be slower.

    Example: efficient-attn advise --seq-len 512:32k:x2 --budget 5m

    Example: efficient-attn advise MODEL --text a.txt --text b.txt --budget 5m

    Example: efficient-attn advise models.py:make_model --min-cosine 0.99
    """
    given = locals()
    _check_effect(given, _OF_A_MODEL if model is None else _OF_ATTENTION, model)
    positive_number("max_error", max_error)
    positive_count("draws", draws)
    for option, value, most in (("min_cosine", min_cosine, 1), ("max_kl", max_kl, _MOST_KL)):
        if not isinstance(value, (int, float)) or not 0 <= value <= most:
            raise OptionError(f"{option} is a number from 0 to {most:g}, not {value!r}.")
    lengths = parse_sizes(seq_lens, name="seq_lens")
    workload = settle(Workload(causal=causal, dtype=dtype, device=device, threads=threads, seed=seed))
    chosen = select(backends, options, exclude=exclude, also=True)
    if backends is None:
        # Loss hides that a window loses recall, which no target here measures.
        chosen = [one for one in chosen if not one.options.get("global_tokens")]
    variants = _variants(chosen, model, ordered=backends is None)
    # Help texts are shown without numpy.
    from efficient_attn.studies.advise.findings import Findings

    findings = Findings(variants, rounds=rounds)
    measurer, limit, notes = measurer_for(
        variants, workload, isolate=isolate, timeout_s=timeout_s, memory_limit=memory_limit
    )
    device = workload.device
    if model is None:
        from efficient_attn.studies.advise.activations import activation_points

        about: dict[str, Any] = {MAX_ERROR: max_error}
        points = activation_points(
            variants,
            lengths,
            workload,
            findings,
            draws=draws,
            rounds=rounds,
            measurer=measurer,
            limit_bytes=limit,
        )
    else:
        from efficient_attn.integrations.called import is_called, maker_of
        from efficient_attn.studies.advise.conversion import model_points
        from efficient_attn.studies.swap.analysis import KL
        from efficient_attn.studies.swap.subject import Subject, candidates

        pairs: Sequence[tuple[Subject, Subject]]
        if is_called(model):
            from efficient_attn.studies.advise.own_inputs import inputs_of_lengths

            _check_effect(given, _OF_A_FOLDER, model)
            maker = maker_of(model, name=name)
            if not maker.takes_length:
                _check_effect(given, ["seq_lens"], model)
            wanted = lengths if maker.takes_length else [None]
            pairs, left_out = inputs_of_lengths(maker, workload, wanted)
            origin = pairs[0][0].about
        else:
            from efficient_attn.studies.advise.held_out import texts_of_lengths
            from efficient_attn.studies.swap.model import load

            named, opened = named_texts(texts), load(model, tokenizer, name, workload)
            pairs, left_out = texts_of_lengths(opened, named, workload, lengths, limit)
            hashes = {key: sha256(text.encode()).hexdigest() for key, text in named.items()}
            origin = {**opened.about, "texts": hashes}
        first = pairs[0][0]
        device = first.shared["device"]
        quantity, fitted = first.loss, candidates(variants, first, options)
        _check_effect(given, ["min_cosine" if quantity == KL else "max_kl"], model)
        target = max_kl if quantity == KL else 1 - min_cosine
        about = {MODEL: origin, LIMIT: {"quantity": quantity, "limit": target}}
        notes = [*first.notes, *left_out]
        points = model_points(pairs, fitted, findings, quantity=quantity, limit=target, rounds=rounds)
    return Plan(
        points=points,
        device=device,
        notes=notes,
        about={**about, CANDIDATES: [one.label for one in variants]},
        timeout_s=timeout_s if model is None else math.inf,
        resources=measurer,
        attach=_same_question,
        budget_s=_BUDGET_S if model is None else _MODEL_BUDGET_S,
        observe=findings.add,
        standing=findings.standing,
        undivided="advise chooses its points by the records of earlier ones; leave it out",
    )


def _same_question(plan: Plan, folder: Path, *, resume: bool) -> Plan:
    """The plan, if the folder was measured for the same target and backends, on which its choices depend."""
    from efficient_attn.studies.run_folder import ENVIRONMENT, read_json

    file = folder / ENVIRONMENT
    known = read_json(file) if resume and file.exists() else plan.about
    for name in (LIMIT, MAX_ERROR, CANDIDATES):
        if known.get(name) != plan.about.get(name):
            was, now = (short(str(about.get(name))) for about in (known, plan.about))
            raise DataError(f"out: {folder} has the {name} {was}, not {now}; name a new folder.")
    return plan


def _check_effect(given: Mapping[str, Any], names: Sequence[str], model: Any) -> None:
    """Refuse options that would be ignored."""
    for name in names:
        if given[name] != inspect.signature(plan).parameters[name].default:
            raise OptionError(f"{name} has no effect {'without a' if model is None else 'with this'} model.")


def _variants(chosen: Sequence[Variant], model: Any, *, ordered: bool) -> tuple[Variant, ...]:
    """Exact attention, then the others, the most promising first; no score matrices in a model unasked."""
    exact = [one for one in chosen if one.backend == YARDSTICK] or select([YARDSTICK])
    left_out = (YARDSTICK, DENSE) if ordered and model is not None else (YARDSTICK,)
    others = [one for one in chosen if one.backend not in left_out]
    return (*exact, *(sorted(others, key=promising) if ordered else others))
