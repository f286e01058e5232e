"""Measurements of a model with replaced attention: points, and the records of one backend and layer."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeAlias

from efficient_attn.measure.calls import MEAN, answer
from efficient_attn.measure.copies import copies_begin
from efficient_attn.measure.error import backends_in, outputs_checked
from efficient_attn.measure.memory import parameter_bytes
from efficient_attn.measure.record import Case, Record, replace
from efficient_attn.measure.variants import MODEL, OWN, UNIFORM_ATTENTION, YARDSTICK, Variant, select
from efficient_attn.measure.worker import memory_of, time_of
from efficient_attn.options import SEED
from efficient_attn.runs.study import Point
from efficient_attn.studies.swap.names import KL
from efficient_attn.studies.swap.record import SwapRecord

if TYPE_CHECKING:
    from efficient_attn.studies.swap.called import CallSubject
    from efficient_attn.studies.swap.model import TextSubject

# A model with its inputs. Only the second kind needs transformers.
ModelSubject: TypeAlias = "CallSubject | TextSubject"

# A preemption would go unnoticed with a single short call per round. A round of long ones is a single call,
# for all variants alike: warm-ups would take minutes.
_FEWEST_CALLS, _ONCE_S = 2, 1.0


def has_copies(subject: ModelSubject) -> bool:
    """Whether recall is measured: in a decoder whose texts are long enough for copies at their end."""
    return subject.loss == KL and copies_begin(subject.shared["tokens"]) < subject.shared["tokens"]


def candidates(chosen: Sequence[Variant], subject: ModelSubject) -> tuple[Variant, ...]:
    """Exact attention, uniform attention, then the other variants."""
    exact = [variant for variant in chosen if variant.backend == YARDSTICK] or select([YARDSTICK])
    others = [subject.fitted(variant) for variant in chosen if variant.backend != YARDSTICK]
    mean = Variant(backend=UNIFORM_ATTENTION, label=UNIFORM_ATTENTION, target=MEAN)
    return (*exact, mean, *others)


def case_of(subject: ModelSubject, kind: str, variant: Variant, layer: int | None = None) -> Case:
    """The case of a measurement, with the shape of the first layer that gets a backend."""
    return variant.case(kind=kind, of=MODEL, layer=layer, **subject.shared)


def distance_point(
    subject: ModelSubject, variant: Variant, layer: int | None = None, *, draws: int = 1
) -> Point:
    """Distance of the outputs with all layers replaced, or one of them."""
    case = case_of(subject, "swap", variant, layer)
    repeats = (subject.num_texts or 1) * (draws if SEED in variant.options else 1)
    return Point(
        case=case,
        measure=partial(answer, case, partial(distance, case, variant, subject, draws)),
        label=f"{variant.label}, {case.tokens} tokens, {'all layers' if layer is None else f'layer {layer}'}",
        series=variant.label,
        cost=repeats * work(case, variant.time_growth),
    )


def pass_point(subject: ModelSubject, variant: Variant, kind: str = "time", *, rounds: int = 0) -> Point:
    """Time of forward passes, or the memory of one."""
    case = case_of(subject, kind, variant)
    return Point(
        case=case,
        measure=partial(cost, case, variant, subject),
        rounds=rounds,
        series=variant.label,
        cost=work(case, variant.time_growth),
    )


def work(case: Case, growth: int = 1) -> float:
    """Products of a layer per head entry: 12 d² for each token in linear layers, 2 n d in attention."""
    return case.tokens * (6.0 * case.model_dim + float(case.tokens) ** (growth - 1))


def plan_point(subject: ModelSubject, variant: Variant, chosen: Mapping[Any, str], **values: Any) -> Point:
    """Distance with a plan {layer: label of its backend}, or the decision for no plan."""
    case = case_of(subject, "swap", variant)

    def measured() -> SwapRecord:
        record = distance(case, variant, subject, draws=1) if chosen else SwapRecord(case=case)
        attached = json.dumps(subject.plan(variant)) if chosen else None
        return replace(record, chosen_layers=json.dumps(chosen), attached_layers=attached, **values)

    return Point(case=case, measure=partial(answer, case, measured), series=OWN, cost=work(case))


def cost(case: Case, variant: Variant, subject: ModelSubject, *, seconds: float = 0.0) -> Record:
    """One round of timed forward passes on the first text, or the peak memory of one."""

    def measured() -> Record:
        with subject.replaced(variant):
            checked = outputs_checked(subject.model)(subject.forward)
            if case.kind == "memory":
                num_bytes = sum(map(parameter_bytes, backends_in(subject.model)))
                return replace(memory_of(case, subject.forward, first=checked), parameter_bytes=num_bytes)
            call, least = subject.forward, _FEWEST_CALLS
            return time_of(case, call, seconds=seconds, first=checked, least=least, once_s=_ONCE_S)

    return answer(case, measured)


def distance(case: Case, variant: Variant, subject: ModelSubject, draws: int) -> SwapRecord:
    """Distance of the model's outputs from the original, for every text and draw of random features."""
    # The exact outputs are computed before the attention is replaced.
    by_text: list[list[dict[str, float]]] = [[] for _ in subject.exact]
    calibrated = False
    for draw in range(draws if SEED in variant.options else 1):
        with subject.replaced(variant, draw, case.layer) as was_calibrated:
            calibrated = calibrated or was_calibrated
            for number, text in enumerate(by_text):
                with outputs_checked(subject.model):
                    text.append(subject.distances(number))
    distances = [part for text in by_text for part in text]
    values: dict[str, Any] = {}
    for name in distances[0]:
        values[f"{name}_draws"] = tuple(part[name] for part in distances)
        values[name] = fmean(values[f"{name}_draws"])
    inputs = subject.calibrated_on if calibrated else None
    return SwapRecord(case=case, texts=subject.num_texts, calibrated_on=inputs, **values)
