"""Points of an advice for a model: at every length quality, gain, a plan of layers, and its verification."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from efficient_attn.runner import worker
from efficient_attn.runner.record import Case, Record, replace
from efficient_attn.runner.sizes import MEAN_OF_VALUES, OWN, PLAN
from efficient_attn.runner.variants import DENSE, YARDSTICK, Variant
from efficient_attn.stats.estimates import call_time, time_ratio
from efficient_attn.studies.advise.choice import best_layers, parsed_layers
from efficient_attn.studies.advise.findings import PROBE, Findings
from efficient_attn.studies.costs import cost_points
from efficient_attn.studies.plan import Point
from efficient_attn.studies.swap import measure
from efficient_attn.studies.swap.subject import Subject

# Shares of the limit that the summed losses of a plan may reach: a later one where an earlier plan misses it.
ATTEMPTS = (1.0, 0.5, 0.25)

_OWN = Variant(backend=OWN, label=OWN, target=OWN)

# Backends that stand in no plan.
_BASELINES = (YARDSTICK, DENSE, MEAN_OF_VALUES)


def model_points(
    pairs: Sequence[tuple[Subject, Subject]],
    variants: Sequence[Variant],
    findings: Findings,
    *,
    quantity: str,
    limit: float,
    rounds: int,
) -> list[Point]:
    """Short calls of attention alone in the shape of the model, then all points of each length."""
    shared = {key: value for key, value in pairs[0][0].shared.items() if key not in ("tokens", "inputs")}
    called = [one for one in variants if one.backend != MEAN_OF_VALUES]
    points = cost_points(called, PROBE, shared, measure=worker.measure, rounds=rounds, kinds=("time",))
    for choosing, held_out in pairs:
        points += ModelAtLength(
            choosing=choosing,
            held_out=held_out,
            variants=variants,
            findings=findings,
            quantity=quantity,
            limit=limit,
            rounds=rounds,
        ).points()
    return points


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelAtLength:
    """A model at one length; later points depend on the records of earlier ones.

    Attributes:
        choosing: Model and inputs by which layers are chosen.
        held_out: Inputs on which the plan is verified.
        quantity, limit: Loss of the outputs and its target.
    """

    choosing: Subject
    held_out: Subject
    variants: Sequence[Variant]
    findings: Findings
    quantity: str
    limit: float
    rounds: int

    def points(self) -> Iterator[Point]:
        """All layers replaced, their times, single layers, then plans and the verification."""
        for variant in self.variants:
            yield self._distance(variant, None, partial(self._may_be_faster, variant))
        for variant in (_OWN, *self.variants):
            yield self._time(self.choosing, variant, partial(self._may_be_faster, variant))
        for variant in self._replacing:
            for layer in self.choosing.layers:
                yield self._distance(variant, layer, partial(self._is_no_slower, variant))
        for number, _ in enumerate(ATTEMPTS):
            yield self._plan(self.choosing, f"{PLAN} {number + 1}", partial(self._chosen, number))
        yield self._plan(self.held_out, PLAN, self._accepted)
        for variant in (_OWN, _plan_variant(PLAN)):
            yield self._time(self.held_out, variant, lambda: bool(self._accepted()))

    @property
    def _replacing(self) -> list[Variant]:
        """Variants that may stand in a plan."""
        return [one for one in self.variants if one.backend not in _BASELINES]

    def _rank(self, variant: Variant) -> float:
        """Baselines, then the fastest by prediction."""
        speed = self.findings.speed(variant.label, self.choosing.shared["tokens"])
        return -math.inf if speed is None or speed.value is None else -speed.value

    def _may_be_faster(self, variant: Variant) -> bool:
        """Whether a variant is a baseline, or not clearly slower by prediction."""
        tokens = self.choosing.shared["tokens"]
        return variant.backend in (OWN, MEAN_OF_VALUES) or not self.findings.too_slow(variant.label, tokens)

    def _is_no_slower(self, variant: Variant) -> bool:
        """Whether the model with the variant in all layers is not clearly slower."""
        own, its = (self._record("time", one) for one in (_OWN, variant))
        return own is not None and its is not None and time_ratio(its, own).side_of_one >= 0

    def _is_settled(self) -> bool:
        """Whether no point on which a plan depends is open, and no earlier plan failed."""
        shared = self.choosing.shared
        return not any(
            self.findings.is_open(one) or (one.case.backend == PLAN and one.status != "ok")
            for one in self.findings.records.values()
            if (one.case.inputs, one.case.tokens) == (shared["inputs"], shared["tokens"])
            and one.case.backend not in _BASELINES
        )

    def _settled(self, chosen: Callable[[], Mapping[int, str]]) -> Mapping[int, str] | None:
        return chosen() if self._is_settled() else None

    def _distance(self, variant: Variant, layer: int | None, needed: Callable[[], bool]) -> Point:
        case = self.choosing.case("swap", variant, layer)
        return Point(
            case=case,
            measure=partial(self._compare, case, variant, self.choosing),
            label=f"{variant.label}, {case.tokens} tokens, "
            f"{'all layers' if layer is None else f'layer {layer}'}",
            group=("layers", case.tokens, layer is None),
            series=variant.label,
            cost=float(case.tokens) ** variant.time_growth,
            calls=self.choosing.num_texts or 1,
            needs=None if layer is None else self.choosing.case("swap", variant),
            needed=needed,
            rank=partial(self._rank, variant),
        )

    def _time(self, subject: Subject, variant: Variant, needed: Callable[[], bool]) -> Point:
        """Times in turns with the other times on these texts."""
        case = subject.case("time", variant)
        if variant.backend == PLAN:
            self.findings.choices[case.key] = partial(self._settled, self._accepted)

        def timed(*, seconds: float) -> Record:
            if variant.backend != PLAN:
                return measure.cost(case, variant, subject, seconds=seconds)
            layers = self._accepted()
            record = measure.cost(case, self._variant(layers), subject, seconds=seconds)
            return record if record.status != "ok" else replace(record, chosen_layers=json.dumps(layers))

        return Point(
            case=case,
            measure=timed,
            rounds=self.rounds,
            label=f"{variant.label}, {case.tokens} tokens, time",
            group=case.inputs,
            series=variant.label,
            cost=float(case.tokens) ** variant.time_growth,
            needs=None if variant.backend == OWN else subject.case("swap", variant),
            needed=needed,
        )

    def _plan(self, subject: Subject, label: str, chosen: Callable[[], Mapping[int, str]]) -> Point:
        """Loss of the layers that are chosen when the point is due; dropped where none is."""
        case = subject.case("swap", _plan_variant(label))
        self.findings.choices[case.key] = partial(self._settled, chosen)

        def measured() -> Record:
            layers = chosen()
            variant = self._variant(layers)
            record = self._compare(case, variant, subject) if layers else Record(case=case)
            if record.status != "ok":
                return record
            return replace(
                record,
                chosen_layers=json.dumps(layers),
                attached_layers=json.dumps(subject.plan(variant)),
                predicted_speed=self._predicted_speed(layers),
            )

        return Point(
            case=case,
            measure=partial(worker.answer, case, measured),
            label=f"{label}, {case.tokens} tokens",
            series=OWN,
            cost=float(case.tokens),
            calls=subject.num_texts or 1,
            # Without layers the last plan is the decision for none.
            needed=lambda: bool(chosen()) or (label == PLAN and self._is_settled()),
        )

    def _compare(self, case: Case, variant: Variant, subject: Subject) -> Record:
        self.findings.keep_outputs_of(subject)
        return measure.distance(case, variant, subject, draws=1)

    def _record(self, kind: str, variant: Variant, layer: int | None = None) -> Record | None:
        """A successful measurement on the texts that choose."""
        found = self.findings.records.get(self.choosing.case(kind, variant, layer).key)
        return found if found is not None and found.status == "ok" else None

    def _gains_s(self) -> dict[str, float]:
        """Seconds that one replaced layer gains, by label; losses are left out."""
        own, found = self._record("time", _OWN), {}
        for variant in self._replacing:
            its = self._record("time", variant)
            if own is not None and its is not None:
                gain_s = call_time(own).median - call_time(its).median
                found[variant.label] = gain_s / len(self.choosing.layers)
        return {label: gain_s for label, gain_s in found.items() if gain_s > 0}

    def _losses(self, layer: int | None) -> dict[str, float]:
        """Finite loss with one layer replaced, or all of them, by label."""
        losses = {one.label: self._loss(self._record("swap", one, layer)) for one in self._replacing}
        return {label: loss for label, loss in losses.items() if loss < math.inf}

    def _loss(self, record: Record | None) -> float:
        """Loss of a record; infinite where it has none."""
        loss = None if record is None else getattr(record, self.quantity)
        return math.inf if loss is None or math.isnan(loss) else float(loss)

    def _chosen(self, number: int) -> Mapping[int, str]:
        """Label of the backend of each layer in an attempt; empty after a plan within the target."""
        layers, gains_s, limit = self.choosing.layers, self._gains_s(), ATTEMPTS[number] * self.limit
        if limit <= 0 or self._accepted(number) or not self._measured(number):
            return {}
        mixed = best_layers({layer: self._losses(layer) for layer in layers}, gains_s, limit)
        whole = [label for label, loss in self._losses(None).items() if loss <= limit and label in gains_s]
        plans = [mixed, *(dict.fromkeys(layers, label) for label in whole)]
        return max(plans, key=lambda plan: sum(gains_s[label] for label in plan.values()))

    def _measured(self, number: int) -> bool:
        """Whether no attempt before this one was skipped or failed."""
        labels = [f"{PLAN} {earlier + 1}" for earlier in range(number)]
        cases = (self.choosing.case("swap", _plan_variant(label)) for label in labels)
        known = (self.findings.records.get(case.key) for case in cases)
        return all(record is None or record.status == "ok" for record in known)

    def _accepted(self, most: int = len(ATTEMPTS)) -> Mapping[int, str]:
        """Layers of the first attempt within the target, of so many."""
        for number in range(most):
            record = self._record("swap", _plan_variant(f"{PLAN} {number + 1}"))
            if record is not None and self._loss(record) <= self.limit:
                return parsed_layers(record.chosen_layers) or {}
        return {}

    def _predicted_speed(self, layers: Mapping[int, str]) -> float | None:
        """Speed-up of the model from the gains of its layers."""
        own, gains_s = self._record("time", _OWN), self._gains_s()
        if own is None:
            return None
        own_s = call_time(own).median
        return own_s / (own_s - sum(gains_s[label] for label in layers.values()))

    def _variant(self, layers: Mapping[int, str]) -> Variant:
        """The backends of the layers as one variant."""
        known = {one.label: one for one in self.variants}
        chosen: dict[int, Any] = {}
        for layer, label in layers.items():
            chosen[layer] = (known[label].target, known[label].options)
        return replace(_plan_variant(PLAN), target=chosen)


def _plan_variant(label: str) -> Variant:
    return Variant(backend=PLAN, label=label, target={})
