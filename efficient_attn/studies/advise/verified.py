"""Plans of a model from records: at every length the bound, the prediction and the verification."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES, MODEL, OWN
from efficient_attn.stats.rounds import Typical, time_ratio
from efficient_attn.studies.advise.findings import PLAN
from efficient_attn.studies.advise.plan import LIMIT
from efficient_attn.studies.swap.analysis import KL, MEAN_POOL

# Losses below this are rounding of float32.
_ROUNDING = 1e-8


class Verified(NamedTuple):
    """Measurements of a model at one length; None: not measured.

    Attributes:
        bound: Speed-up with the mean of the values for attention: nothing can gain more (Amdahl's law).
        predicted: Speed-up of the plan, from the gains of its layers.
        gain: Measured speed-up of the plan on held-out texts.
        loss: Loss of the plan on held-out texts.
        layers: Label of the backend of each replaced layer; empty without a plan.
        nearest: Label and loss of the replacement of all layers with the smallest loss.
        times: Records of times at this length.
    """

    tokens: int
    bound: Typical | None
    predicted: float | None
    gain: Typical | None
    loss: float | None
    layers: Mapping[int, str]
    nearest: tuple[str, float] | None
    times: tuple[Record, ...]

    @property
    def share(self) -> float | None:
        """Share of attention in the time of the model."""
        return None if self.bound is None else max(1 - 1 / self.bound.median, 0.0)


def target(environment: Mapping[str, Any]) -> tuple[str, float]:
    """Quantity and limit of the loss."""
    known = environment.get(LIMIT)
    known = known if isinstance(known, Mapping) else {}
    limit = known.get("limit")
    sound = isinstance(limit, (int, float)) and not isinstance(limit, bool) and 0 <= limit < float("inf")
    return KL if known.get("quantity") == KL else MEAN_POOL, float(limit or 0.0) if sound else 0.0


def verified(records: Sequence[Record], environment: Mapping[str, Any]) -> list[Verified]:
    """One entry per length, the shortest first."""
    quantity, _ = target(environment)
    groups: dict[int, list[Record]] = {}
    for record in records:
        if record.case.of == MODEL and record.status == "ok":
            groups.setdefault(record.case.tokens, []).append(record)
    return [_at(tokens, groups[tokens], quantity) for tokens in sorted(groups)]


def _at(tokens: int, records: Sequence[Record], quantity: str) -> Verified:
    times = [one for one in records if one.case.kind == "time" and one.times_s]
    by_backend = {one.case.backend: one for one in times}
    own = {one.case.inputs: one for one in times if one.case.backend == OWN}
    mean, planned = by_backend.get(MEAN_OF_VALUES), by_backend.get(PLAN)
    first = None if mean is None else own.get(mean.case.inputs)
    held_out = None if planned is None else own.get(planned.case.inputs)
    whole = [one for one in records if one.case.kind == "swap" and one.case.layer is None]
    candidates = [one for one in whole if one.case.backend not in (MEAN_OF_VALUES, PLAN)]
    losses = {one.case.label: getattr(one, quantity) for one in candidates}
    replacing = [(loss, label) for label, loss in losses.items() if loss is not None and loss > _ROUNDING]
    plan = next((one for one in whole if one.case.label == PLAN), None)
    layers = {} if plan is None else json.loads(plan.chosen_layers or "{}")
    return Verified(
        tokens=tokens,
        bound=None if mean is None or first is None else time_ratio(mean, first),
        predicted=None if plan is None else plan.predicted_speed,
        gain=None if planned is None or held_out is None else time_ratio(planned, held_out),
        loss=None if plan is None else getattr(plan, quantity),
        layers={int(layer): label for layer, label in layers.items()},
        nearest=(min(replacing)[1], min(replacing)[0]) if replacing else None,
        times=tuple(times),
    )
