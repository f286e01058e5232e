"""Records of an adaptation: its cost, and fidelity of the whole model and of each layer."""

from collections.abc import Mapping
from statistics import fmean

from efficient_attn.backend import Backend
from efficient_attn.integrations.transformers.attachment import installed
from efficient_attn.integrations.transformers.low_rank import merged
from efficient_attn.measure.checked import outputs_checked
from efficient_attn.runner.counting import attention_flops
from efficient_attn.runner.record import Case, Record, replace
from efficient_attn.runner.variants import Variant
from efficient_attn.runner.worker import answer
from efficient_attn.studies.adapt.training import Adaptations, parameters_of
from efficient_attn.studies.swap import measure as swapping


def training(case: Case, adaptations: Adaptations, variant: Variant, *, lora: bool) -> Record:
    """Cost of the adaptation of all layers, or of LoRA after it."""

    def measured() -> Record:
        made = adaptations.adapted(variant, lora=lora)
        return Record(
            case=case,
            adapt_s=made.seconds_s,
            adapt_steps=made.steps,
            adapt_loss=made.loss,
            adapt_learning_rate=made.rates.get(None),
            adapted_parameters=parameters_of({"": made.additions} if made.additions else made.backends),
            calibrated_on=None if made.steps else adaptations.calibrated_on,
            flops=_flops(case, adaptations, made.backends),
        )

    return answer(case, measured)


def whole(
    case: Case, adaptations: Adaptations, variant: Variant, *, adapted: bool, lora: bool = False
) -> Record:
    """Distances of the model's outputs on held-out windows, with all layers replaced."""
    subject = adaptations.subject
    if not adapted:
        return swapping.distance(case, variant, subject, draws=1)

    def measured() -> Record:
        # The exact outputs are computed before the attention is replaced.
        texts, made = range(len(subject.exact)), adaptations.adapted(variant, lora=lora)
        backends = made.backends
        with (
            installed(subject.model, subject.sites.every, backends),
            merged(subject.model, made.additions),
            outputs_checked(subject.model),
        ):
            found = [subject.distances(number) for number in texts]
        record = Record(case=case, texts=len(texts), flops=_flops(case, adaptations, backends))
        return replace(record, **swapping.means(found))

    return answer(case, measured)


def layer(case: Case, adaptations: Adaptations, variant: Variant, *, adapted: bool) -> Record:
    """Fidelity of one layer on the exact queries, keys and values of held-out windows."""

    def measured() -> Record:
        assert case.layer is not None, "every case is of one layer"
        found = [one[case.layer] for one in adaptations.fidelity(variant, adapted=adapted)]
        errors, distances = (tuple(values) for values in zip(*found, strict=True))
        return Record(
            case=case,
            texts=len(found),
            output_relative_error=fmean(errors),
            output_relative_error_draws=errors,
            output_distance=fmean(distances),
            output_distance_draws=distances,
            adapt_learning_rate=adaptations.adapted(variant).rates.get(case.layer) if adapted else None,
        )

    return answer(case, measured)


def _flops(case: Case, adaptations: Adaptations, backends: Mapping[str, Backend]) -> int | None:
    """Operations of one layer's attention, mean over layers: calibrations differ."""
    found = [attention_flops(case, backends[site.path].counted) for site in adaptations.subject.sites.swapped]
    known = [one for one in found if one is not None]
    return round(fmean(known)) if len(known) == len(found) else None
