"""Outputs and costs of a model with replaced attention: one record per backend and layer."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean
from typing import Any

from torch import Tensor

from efficient_attn.integrations.transformers.attachment import installed
from efficient_attn.integrations.transformers.swapping import (
    Outputs,
    build_for,
    build_layers,
    calibrate_on,
    forward,
    run,
)
from efficient_attn.measure import outputs
from efficient_attn.measure.checked import backends_in, outputs_checked
from efficient_attn.measure.memory import parameter_bytes
from efficient_attn.runner.counting import attention_flops
from efficient_attn.runner.record import Case, Record, replace
from efficient_attn.runner.sizes import OWN, SEED
from efficient_attn.runner.variants import Variant
from efficient_attn.runner.worker import answer, memory_of, time_of
from efficient_attn.studies.swap.model import Subject

# Text for calibration; the other texts are held out.
FIRST_TEXT = "the first text"

# A preemption would go unnoticed with a single call per round.
_FEWEST_CALLS = 2


def distance(case: Case, variant: Variant, subject: Subject, *, draws: int) -> Record:
    """Distance of the model's outputs from the original, for every text and draw of random features."""
    return answer(case, lambda: _distance(case, variant, subject, draws))


def cost(case: Case, variant: Variant, subject: Subject, *, seconds: float = 0.0) -> Record:
    """One round of timed forward passes on the first text, or the peak memory of one."""

    def measured() -> Record:
        with replaced(variant, subject):
            call = partial(forward, subject.model, subject.texts[0])
            checked = outputs_checked(subject.model)(call)
            if case.kind == "memory":
                kept = sum(map(parameter_bytes, backends_in(subject.model)))
                return replace(memory_of(case, call, first=checked), parameter_bytes=kept)
            return time_of(case, call, seconds=seconds, first=checked, least=_FEWEST_CALLS)

    return answer(case, measured)


def _distance(case: Case, variant: Variant, subject: Subject, draws: int) -> Record:
    # Computed before the attention is replaced.
    exact = subject.exact
    found: list[list[dict[str, float]]] = [[] for _ in subject.texts]
    calibrated = False
    for draw in range(draws if SEED in variant.options else 1):
        with replaced(variant, subject, draw, case.layer) as was_calibrated:
            calibrated = calibrated or was_calibrated
            for number, ids in enumerate(subject.texts):
                with outputs_checked(subject.model):
                    given = run(subject.model, ids, predicts=subject.predicts)
                found[number].append(_compared(given, exact[number], ids, subject))
    record = Record(
        case=case,
        texts=len(subject.texts),
        calibrated_on=FIRST_TEXT if calibrated else None,
        flops=None if _uncounted(variant) else attention_flops(case, variant.target),
    )
    return replace(record, **_means([one for text in found for one in text]))


def _uncounted(variant: Variant) -> bool:
    """Whether a variant is the model's own attention, or backends by layer."""
    return variant.backend == OWN or isinstance(variant.target, Mapping)


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The mean of each quantity, and all its values."""
    values = {name: tuple(one[name] for one in found) for name in found[0]}
    draws = {f"{name}_draws": drawn for name, drawn in values.items()}
    return {name: fmean(drawn) for name, drawn in values.items()} | draws


def _compared(given: Outputs, exact: Outputs, ids: Tensor, subject: Subject) -> dict[str, float]:
    found = {"hidden_relative_error": outputs.relative_error(given.hidden, exact.hidden)}
    if given.logits is not None and exact.logits is not None:
        found["next_token_kl"] = outputs.next_token_kl(given.logits, exact.logits)
        found["next_token_disagreement"] = outputs.next_token_disagreement(given.logits, exact.logits)
        found["perplexity"] = outputs.perplexity(given.logits, ids[0])
    elif not subject.sites.causal:
        pooled = (states.hidden.double().mean(dim=0) for states in (given, exact))
        found["mean_pool_distance"] = outputs.cosine_distance(*pooled)
        found["first_token_distance"] = outputs.cosine_distance(given.hidden[0], exact.hidden[0])
    return found


@contextmanager
def replaced(variant: Variant, subject: Subject, draw: int = 0, layer: int | None = None) -> Iterator[bool]:
    """The model with the variant in its layers, and whether calibration was required.

    The target of a variant may be a mapping from layers to choices.
    """
    if variant.backend == OWN:
        yield False
        return
    options, sites, tokens = dict(variant.options), subject.sites, subject.shared["tokens"]
    # All layers derive their own seeds from this seed.
    seed = subject.shared["seed"] + options.pop(SEED, 0) + draw
    if isinstance(variant.target, Mapping):
        backends = build_layers(sites, variant.target, max_tokens=tokens, seed=seed)
    else:
        backends = build_for(sites, variant.target, options, layer=layer, max_tokens=tokens, seed=seed)
    with installed(subject.model, sites.every, backends):
        text = subject.texts[0] if subject.calibration is None else subject.calibration
        yield calibrate_on(subject.model, list(backends.values()), text)
