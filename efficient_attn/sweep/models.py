"""Outputs and costs of a model with replaced attention: one record per backend and layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from torch import Tensor

from efficient_attn.integrations.transformers.attachment import installed
from efficient_attn.integrations.transformers.loading import Opened
from efficient_attn.integrations.transformers.swapping import (
    AttentionSites,
    Outputs,
    build_for,
    calibrate_on,
    forward,
    predicts_next,
    run,
)
from efficient_attn.measure import outputs as measure
from efficient_attn.measure.checked import backends_in, outputs_checked
from efficient_attn.measure.memory import parameter_bytes
from efficient_attn.sweep.case import Case, Record, replace
from efficient_attn.sweep.counting import attention_flops
from efficient_attn.sweep.sizes import OWN, SEED
from efficient_attn.sweep.variants import Variant
from efficient_attn.sweep.worker import answer, memory_of, time_of

# Text for calibration; the other texts are held out.
FIRST_TEXT = "the first text"

# Duration of one round of timing, and its fewest calls: of a single call a preemption would go unnoticed.
_TURN_S, _FEWEST_CALLS = 0.3, 2


@dataclass(frozen=True, eq=False)
class ModelSubject:
    """A model and the texts that it runs on.

    Attributes:
        texts: Token ids, [1 tokens] each, of one length.
        shared: Fields common to all cases.
    """

    opened: Opened
    sites: AttentionSites
    texts: tuple[Tensor, ...]
    shared: Mapping[str, Any]

    @property
    def model(self) -> Any:
        return self.opened.model

    @cached_property
    def predicts(self) -> bool:
        """Whether next-token distributions are compared, rather than embeddings."""
        return predicts_next(self.model, self.sites)

    @cached_property
    def exact(self) -> tuple[Outputs, ...]:
        """Outputs of the model with its own attention."""
        return tuple(run(self.model, ids, predicts=self.predicts) for ids in self.texts)

    def case(self, kind: str, variant: Variant, layer: int | None = None) -> Case:
        return Case(
            kind=kind,
            backend=variant.backend,
            label=variant.label,
            options=variant.options,
            of="model",
            layer=layer,
            **self.shared,
        )

    @property
    def seed(self) -> int:
        return int(self.shared["seed"])


def own() -> Variant:
    """The model's own attention."""
    return Variant(backend=OWN, label=OWN, target=OWN)


def measure_swap(variant: Variant, subject: ModelSubject, *, seeds: int, layer: int | None = None) -> Record:
    """Distance of the model's outputs from the original, for every text and draw of random features."""
    case = subject.case("swap", variant, layer)
    return answer(case, lambda: _measured(case, variant, subject, seeds, layer))


def measure_own(subject: ModelSubject) -> Record:
    """Perplexity of the original model."""
    case = subject.case("swap", own())
    return answer(case, lambda: _own(case, subject))


def measure_time(variant: Variant, subject: ModelSubject) -> Record:
    """One round of timed forward passes on the first text."""
    case = subject.case("time", variant)
    return answer(case, lambda: _timed(case, variant, subject))


def measure_memory(variant: Variant, subject: ModelSubject) -> Record:
    """Peak memory of one forward pass on the first text, and the bytes of the backends' parameters."""
    case = subject.case("memory", variant)
    return answer(case, lambda: _peak(case, variant, subject))


def _measured(case: Case, variant: Variant, subject: ModelSubject, seeds: int, layer: int | None) -> Record:
    # Computed before the attention is replaced.
    exact = subject.exact
    draws = range(seeds if SEED in variant.options else 1)
    found: list[list[dict[str, Any]]] = [[] for _ in subject.texts]
    calibrated = False
    for draw in draws:
        with _swapped(variant, subject, draw, layer) as was_calibrated:
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
    if layer is None:
        record = replace(record, hidden_relative_error_layers=tuple(map(fmean, zip(*layers, strict=True))))
    return replace(record, **_means(one_by_one))


def _own(case: Case, subject: ModelSubject) -> Record:
    pairs = zip(subject.exact, subject.texts, strict=True)
    told = [
        {"perplexity": measure.perplexity(exact.logits, ids[0])}
        for exact, ids in pairs
        if exact.logits is not None
    ]
    return replace(Record(case=case, texts=len(subject.texts)), **_means(told))


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The mean of each quantity, and all its values."""
    names = found[0] if found else ()
    values = {name: tuple(one[name] for one in found) for name in names}
    return {name: fmean(all_) for name, all_ in values.items()} | {
        f"{name}_draws": all_ for name, all_ in values.items()
    }


def _compared(given: Outputs, exact: Outputs, ids: Tensor, subject: ModelSubject) -> dict[str, Any]:
    layers = [measure.relative_error(*pair) for pair in zip(given.hidden, exact.hidden, strict=True)]
    found: dict[str, Any] = {"layers": layers, "hidden_relative_error": layers[-1]}
    last, wanted = given.hidden[-1], exact.hidden[-1]
    if given.logits is not None and exact.logits is not None:
        found["next_token_kl"] = measure.next_token_kl(given.logits, exact.logits)
        found["next_token_disagreement"] = measure.next_token_disagreement(given.logits, exact.logits)
        found["perplexity"] = measure.perplexity(given.logits, ids[0])
    elif not subject.sites.causal:
        found["mean_pool_distance"] = measure.cosine_distance(
            last.double().mean(dim=0), wanted.double().mean(dim=0)
        )
        found["first_token_distance"] = measure.cosine_distance(last[0], wanted[0])
    return found


def _timed(case: Case, variant: Variant, subject: ModelSubject) -> Record:
    with _swapped(variant, subject):
        call, first = _call(subject), _checked(subject)
        return time_of(case, call, seconds=_TURN_S, first=first, least=_FEWEST_CALLS)


def _peak(case: Case, variant: Variant, subject: ModelSubject) -> Record:
    with _swapped(variant, subject):
        record = memory_of(case, _call(subject), first=_checked(subject))
        kept = sum(parameter_bytes(m) for m in backends_in(subject.model))
        return replace(record, parameter_bytes=kept)


def _call(subject: ModelSubject) -> Callable[[], object]:
    return lambda: forward(subject.model, subject.texts[0])


def _checked(subject: ModelSubject) -> Callable[[], object]:
    def call() -> object:
        with outputs_checked(subject.model):
            return _call(subject)()

    return call


@contextmanager
def _swapped(
    variant: Variant, subject: ModelSubject, draw: int = 0, layer: int | None = None
) -> Iterator[bool]:
    """The model with the variant in its layers, and whether calibration was required."""
    if variant.backend == OWN:
        yield False
        return
    options = dict(variant.options)
    # All layers derive their own seeds from this seed.
    seed = subject.seed + options.pop(SEED, 0) + draw
    sites = subject.sites
    backends = build_for(
        sites, variant.target, options, layer=layer, max_tokens=subject.shared["tokens"], seed=seed
    )
    with installed(subject.model, sites.every, backends):
        yield calibrate_on(subject.model, list(backends.values()), subject.texts[0])
