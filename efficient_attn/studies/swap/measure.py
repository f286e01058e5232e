"""Outputs and costs of a model with replaced attention: one record per backend and layer."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from efficient_attn.measure.calls import attention_flops
from efficient_attn.measure.error import backends_in, outputs_checked
from efficient_attn.measure.memory import parameter_bytes
from efficient_attn.measure.record import Case, Record, replace
from efficient_attn.measure.variants import OWN, Variant
from efficient_attn.measure.worker import answer, memory_of, time_of
from efficient_attn.options import SEED
from efficient_attn.studies.swap.subject import Subject

# A preemption would go unnoticed with a single call per round.
_FEWEST_CALLS = 2


def distance(case: Case, variant: Variant, subject: Subject, *, draws: int) -> Record:
    """Distance of the model's outputs from the original, for every text and draw of random features."""
    return answer(case, lambda: _distance(case, variant, subject, draws))


def cost(case: Case, variant: Variant, subject: Subject, *, seconds: float = 0.0) -> Record:
    """One round of timed forward passes on the first text, or the peak memory of one."""

    def measured() -> Record:
        with subject.replaced(variant):
            checked = outputs_checked(subject.model)(subject.forward)
            if case.kind == "memory":
                num_bytes = sum(map(parameter_bytes, backends_in(subject.model)))
                return replace(memory_of(case, subject.forward, first=checked), parameter_bytes=num_bytes)
            return time_of(case, subject.forward, seconds=seconds, first=checked, least=_FEWEST_CALLS)

    return answer(case, measured)


def _distance(case: Case, variant: Variant, subject: Subject, draws: int) -> Record:
    # The exact outputs are computed before the attention is replaced.
    by_text: list[list[dict[str, float]]] = [[] for _ in subject.exact]
    calibrated = False
    for draw in range(draws if SEED in variant.options else 1):
        with subject.replaced(variant, draw, case.layer) as was_calibrated:
            calibrated = calibrated or was_calibrated
            for number, values in enumerate(by_text):
                with outputs_checked(subject.model):
                    values.append(subject.distances(number))
    # The attention of the model, or backends by layer.
    uncounted = variant.backend == OWN or isinstance(variant.target, Mapping)
    record = Record(
        case=case,
        texts=subject.num_texts,
        calibrated_on=subject.calibrated_on if calibrated else None,
        flops=None if uncounted else attention_flops(case, variant.target),
    )
    return replace(record, **_means([values for text in by_text for values in text]))


def _means(distances: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The mean of each quantity, and all its values."""
    values = {name: tuple(values[name] for values in distances) for name in distances[0]}
    draws = {f"{name}_draws": drawn for name, drawn in values.items()}
    return {name: fmean(drawn) for name, drawn in values.items()} | draws
