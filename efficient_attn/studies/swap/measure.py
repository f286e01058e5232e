"""Outputs and costs of a model with replaced attention: one record per backend and layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from torch import Tensor

from efficient_attn.integrations.transformers.attachment import installed
from efficient_attn.integrations.transformers.swapping import Outputs, build_for, calibrate_on, forward, run
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


def own(case: Case, subject: Subject) -> Record:
    """Perplexity of the original model."""

    def perplexities() -> Record:
        pairs = zip(subject.exact, subject.texts, strict=True)
        found = [
            {"perplexity": outputs.perplexity(exact.logits, ids[0])}
            for exact, ids in pairs
            if exact.logits is not None
        ]
        return replace(Record(case=case, texts=len(subject.texts)), **_means(found))

    return answer(case, perplexities)


def time(case: Case, variant: Variant, subject: Subject, *, seconds: float) -> Record:
    """One round of timed forward passes on the first text."""

    def timed() -> Record:
        with _replaced(variant, subject):
            call, first = _call(subject), _checked(subject)
            return time_of(case, call, seconds=seconds, first=first, least=_FEWEST_CALLS)

    return answer(case, timed)


def memory(case: Case, variant: Variant, subject: Subject) -> Record:
    """Peak memory of one forward pass on the first text, and the bytes of the backends' parameters."""

    def traced() -> Record:
        with _replaced(variant, subject):
            record = memory_of(case, _call(subject), first=_checked(subject))
            kept = sum(parameter_bytes(module) for module in backends_in(subject.model))
            return replace(record, parameter_bytes=kept)

    return answer(case, traced)


def _distance(case: Case, variant: Variant, subject: Subject, draws: int) -> Record:
    # Computed before the attention is replaced.
    exact = subject.exact
    found: list[list[dict[str, Any]]] = [[] for _ in subject.texts]
    calibrated = False
    for draw in range(draws if SEED in variant.options else 1):
        with _replaced(variant, subject, draw, case.layer) as was_calibrated:
            calibrated = calibrated or was_calibrated
            for number, ids in enumerate(subject.texts):
                with outputs_checked(subject.model):
                    given = run(subject.model, ids, predicts=subject.predicts)
                found[number].append(_compared(given, exact[number], ids, subject))
    one_by_one = [one for text in found for one in text]
    record = Record(
        case=case,
        texts=len(subject.texts),
        calibrated_on=FIRST_TEXT if calibrated else None,
        flops=attention_flops(case, variant.target),
    )
    layers = [one.pop("layers") for one in one_by_one]
    if case.layer is None:
        record = replace(record, hidden_relative_error_layers=tuple(map(fmean, zip(*layers, strict=True))))
    return replace(record, **_means(one_by_one))


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The mean of each quantity, and all its values."""
    names = found[0] if found else ()
    values = {name: tuple(one[name] for one in found) for name in names}
    return {name: fmean(all_) for name, all_ in values.items()} | {
        f"{name}_draws": all_ for name, all_ in values.items()
    }


def _compared(given: Outputs, exact: Outputs, ids: Tensor, subject: Subject) -> dict[str, Any]:
    layers = [outputs.relative_error(*pair) for pair in zip(given.hidden, exact.hidden, strict=True)]
    found: dict[str, Any] = {"layers": layers, "hidden_relative_error": layers[-1]}
    last, wanted = given.hidden[-1], exact.hidden[-1]
    if given.logits is not None and exact.logits is not None:
        found["next_token_kl"] = outputs.next_token_kl(given.logits, exact.logits)
        found["next_token_disagreement"] = outputs.next_token_disagreement(given.logits, exact.logits)
        found["perplexity"] = outputs.perplexity(given.logits, ids[0])
    elif not subject.sites.causal:
        found["mean_pool_distance"] = outputs.cosine_distance(
            last.double().mean(dim=0), wanted.double().mean(dim=0)
        )
        found["first_token_distance"] = outputs.cosine_distance(last[0], wanted[0])
    return found


def _call(subject: Subject) -> Callable[[], object]:
    return lambda: forward(subject.model, subject.texts[0])


def _checked(subject: Subject) -> Callable[[], object]:
    def call() -> object:
        with outputs_checked(subject.model):
            return _call(subject)()

    return call


@contextmanager
def _replaced(variant: Variant, subject: Subject, draw: int = 0, layer: int | None = None) -> Iterator[bool]:
    """The model with the variant in its layers, and whether calibration was required."""
    if variant.backend == OWN:
        yield False
        return
    options = dict(variant.options)
    # All layers derive their own seeds from this seed.
    seed = subject.shared["seed"] + options.pop(SEED, 0) + draw
    sites = subject.sites
    backends = build_for(
        sites, variant.target, options, layer=layer, max_tokens=subject.shared["tokens"], seed=seed
    )
    with installed(subject.model, sites.every, backends):
        yield calibrate_on(subject.model, list(backends.values()), subject.texts[0])
