"""Plans of a model from records: at every length the bound, the prediction and the verification."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import MEAN_OF_VALUES, MODEL, OWN, PLAN
from efficient_attn.stats.estimates import Typical, time_ratio
from efficient_attn.studies.advise.choice import parsed_layers
from efficient_attn.studies.advise.plan import LIMIT
from efficient_attn.studies.advise.shapes import BOUND
from efficient_attn.studies.swap.analysis import KL, MEAN_POOL, OUTPUT_COSINE

# Losses below this are rounding of float32.
_ROUNDING = 1e-8


class Verified(NamedTuple):
    """Measurements of a model at one length; None: not measured.

    Attributes:
        bound: Speed-up with the mean of the values for attention: about the most possible (Amdahl's law).
        plan: Record of the plan on held-out texts.
        gain: Measured speed-up of the plan on held-out texts.
        loss: Loss of the plan on held-out texts.
        layers: Label of the backend of each replaced layer; empty: no plan is within the target; None: the
            run ended before it was chosen.
        side: 1: the plan is within the target and clearly faster; −1: there is none, it misses the target, or
            it is clearly slower; 0: its times leave it open; None: the run ended before.
        nearest: Label and loss of the replacement of all layers with the smallest loss.
        times: Records of times at this length.
    """

    tokens: int
    bound: Typical | None
    plan: Record | None
    gain: Typical | None
    loss: float | None
    layers: Mapping[int, str] | None
    side: int | None
    nearest: tuple[str, float] | None
    times: tuple[Record, ...]

    @property
    def share(self) -> float | None:
        """Share of attention in the time of the model."""
        speed = 0.0 if self.bound is None else self.bound.median
        return max(1 - 1 / speed, 0.0) if speed > 0 else None


def target(environment: Mapping[str, Any]) -> tuple[str, float]:
    """Quantity and limit of the loss."""
    known = environment.get(LIMIT)
    known = known if isinstance(known, Mapping) else {}
    limit = known.get("limit")
    sound = isinstance(limit, (int, float)) and 0 <= limit <= sys.float_info.max
    quantity = known.get("quantity")
    return quantity if quantity in (KL, OUTPUT_COSINE) else MEAN_POOL, float(limit or 0.0) if sound else 0.0


def verified(records: Sequence[Record], environment: Mapping[str, Any]) -> list[Verified]:
    """One entry per length, the shortest first."""
    quantity, limit = target(environment)
    of_model = [one for one in records if one.case.of == MODEL]
    groups: dict[int, list[Record]] = {one.case.tokens: [] for one in of_model}
    for record in of_model:
        groups[record.case.tokens] += [record] if record.status == "ok" else []
    return [_at(tokens, groups[tokens], quantity, limit) for tokens in sorted(groups)]


def _at(tokens: int, records: Sequence[Record], quantity: str, limit: float) -> Verified:
    times = [one for one in records if one.case.kind == "time" and one.times_s]
    bounds = {one.case.backend: one for one in records if one.case.kind == BOUND and one.times_s}
    own = {one.case.inputs: one for one in times if one.case.backend == OWN}
    # A resumed run may choose another plan; the last one counts.
    plans = [one for one in records if one.case.kind == "swap" and one.case.label == PLAN]
    plan = plans[-1] if plans else None
    planned = next((one for one in times if plan and one.case.options == plan.case.options != {}), None)
    mean, first = bounds.get(MEAN_OF_VALUES), bounds.get(OWN)
    held_out = None if planned is None else own.get(planned.case.inputs)
    whole = [one for one in records if one.case.kind == "swap" and one.case.layer is None]
    candidates = [one for one in whole if one.case.backend not in (MEAN_OF_VALUES, PLAN)]
    losses = {one.case.label: getattr(one, quantity) for one in candidates}
    replacing = [(loss, label) for label, loss in losses.items() if loss is not None and loss > _ROUNDING]
    layers = None if plan is None else parsed_layers(plan.chosen_layers)
    loss = None if plan is None else getattr(plan, quantity)
    gain = None if planned is None or held_out is None else time_ratio(planned, held_out)
    side = None if layers is None or gain is None else gain.side_of_one
    return Verified(
        tokens=tokens,
        bound=None if mean is None or first is None else time_ratio(mean, first),
        plan=plan,
        gain=gain,
        loss=loss,
        layers=layers,
        side=-1 if layers == {} or (loss is not None and loss > limit) else side,
        nearest=(min(replacing)[1], min(replacing)[0]) if replacing else None,
        times=tuple(times),
    )
