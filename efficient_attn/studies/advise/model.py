"""Steps of an advice for a model: the bound, losses, a plan of layers and its verification."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial

from efficient_attn.measure import worker
from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.record import replace as with_values
from efficient_attn.measure.variants import DENSE, MEAN_OF_VALUES, OWN, PLAN, YARDSTICK, Variant
from efficient_attn.stats.estimates import call_time, time_ratio
from efficient_attn.stats.predicted_time import Predicted, time_models
from efficient_attn.studies.advise.choice import best_layers
from efficient_attn.studies.advise.shapes import BOUND, PROBE
from efficient_attn.studies.costs import Costs
from efficient_attn.studies.points import Point, Steps
from efficient_attn.studies.swap import measure
from efficient_attn.studies.swap.subject import Subject

# Shares of the limit that the summed losses of a plan may reach: a later one where an earlier plan misses it.
ATTEMPTS = (1.0, 0.5, 0.25)

# A default that misses the limit by this factor ends the further variants of its backend.
_HOPELESS = 10.0

_OWN = Variant(backend=OWN, label=OWN, target=OWN)

# Backends that stand in no plan.
_BASELINES = (YARDSTICK, DENSE, MEAN_OF_VALUES)


def model_steps(
    pairs: Sequence[tuple[Subject, Subject]],
    variants: Sequence[Variant],
    *,
    quantity: str,
    limit: float,
    rounds: int,
) -> Steps:
    """Short calls of attention alone in the shape of the model, then all points of each length."""
    first = pairs[0][0]
    shared = {key: value for key, value in first.shared.items() if key not in ("tokens", "inputs")}
    costs = Costs(shared={**shared, "inputs": "gaussian"}, measure=worker.measure, rounds=rounds)
    called = [variant for variant in variants if variant.backend != MEAN_OF_VALUES]
    short = yield [costs.time(variant, tokens) for tokens in PROBE for variant in called]
    models = time_models(short, {variant.label: variant.target for variant in called})
    for choosing, held_out in pairs:
        tokens = choosing.shared["tokens"]
        speeds = {}
        if YARDSTICK in models and tokens >= PROBE[0]:
            speeds = {label: model.speed(models[YARDSTICK], tokens=tokens) for label, model in models.items()}
        slower = {label for label, speed in speeds.items() if speed.high is not None and speed.high < 1}
        may_be_faster = [variant for variant in variants if variant.label not in slower - {YARDSTICK}]
        fastest_first = sorted(may_be_faster, key=partial(_rank, speeds))
        yield from _plan_steps(
            choosing, held_out, fastest_first, quantity=quantity, limit=limit, rounds=rounds
        )


def _rank(speeds: Mapping[str, Predicted], variant: Variant) -> float:
    """Place in the order of measurement: baselines, then the fastest by prediction."""
    speed = speeds.get(variant.label)
    return -math.inf if variant.backend in _BASELINES or speed is None else -(speed.value or 0.0)


def _plan_steps(
    choosing: Subject,
    held_out: Subject,
    variants: Sequence[Variant],
    *,
    quantity: str,
    limit: float,
    rounds: int,
) -> Steps:
    """The bound, all layers replaced, their times, single layers, then plans until one is near enough."""

    def loss_of(record: Record) -> float:
        loss = getattr(record, quantity) if record.status == "ok" else None
        return math.inf if loss is None or math.isnan(loss) else float(loss)

    def timed(
        subject: Subject,
        variant: Variant,
        *,
        kind: str = "time",
        layers: Mapping[int, str] | None = None,
    ) -> Point:
        case = subject.case(kind, variant)
        return Point(
            case=case,
            measure=partial(_timed, case, variant, subject, layers=layers),
            rounds=rounds,
            label=f"{variant.label}, {case.tokens} tokens, {kind}",
            series=variant.label,
            cost=float(case.tokens) ** variant.time_growth,
        )

    mean = next(variant for variant in variants if variant.backend == MEAN_OF_VALUES)
    if (yield _distance(choosing, mean)).status == "ok":
        own, bound = yield [timed(choosing, variant, kind=BOUND) for variant in (_OWN, mean)]
        if own.times_s and bound.times_s and time_ratio(bound, own).side_of_one < 1:
            # No attention, however cheap, would make the model clearly faster.
            return
    losses_of_all: dict[str, float] = {}
    working: list[Variant] = []
    skipped = False
    for variant in variants:
        hopeless = losses_of_all.get(variant.backend, 0.0) > _HOPELESS * limit
        if variant is mean or (hopeless and variant.label != variant.backend):
            continue
        record = yield _distance(choosing, variant)
        if record.status == "ok":
            working.append(variant)
            losses_of_all[variant.label] = loss_of(record)
        skipped |= record.status == "skipped"
    own, *times = yield [timed(choosing, variant) for variant in (_OWN, *working)]
    skipped |= any(record.status == "skipped" for record in (own, *times))
    gains_s = _gains_s(own, list(zip(working, times, strict=True)), len(choosing.layers))
    losses: dict[int, dict[str, float]] = {layer: {} for layer in choosing.layers}
    for variant in working:
        if variant.label in gains_s:
            for layer in choosing.layers:
                record = yield _distance(choosing, variant, layer)
                losses[layer][variant.label] = loss_of(record)
                skipped |= record.status == "skipped"
    gains_s = {label: gain_s for label, gain_s in gains_s.items() if gain_s > 0}

    chosen: Mapping[int, str] = {}
    for number, share in enumerate(ATTEMPTS, start=1):
        layers = _best_plan(losses, losses_of_all, gains_s, share * limit)
        if not layers:
            break
        point = _planned(choosing, f"{PLAN} {number}", layers, working, _speed(own, gains_s, layers))
        record = yield point
        if record.status != "ok":
            return
        if loss_of(record) <= limit:
            chosen = layers
            break
    if skipped and not chosen:
        # What the budget left out may be the plan.
        return
    # Exact outputs of one set of texts are kept at a time.
    vars(choosing).pop("exact", None)
    yield _planned(held_out, PLAN, chosen, working, _speed(own, gains_s, chosen))
    if chosen:
        yield [timed(held_out, _OWN), timed(held_out, _plan_variant(PLAN, chosen, working), layers=chosen)]
    vars(held_out).pop("exact", None)


def _distance(subject: Subject, variant: Variant, layer: int | None = None) -> Point:
    case = subject.case("swap", variant, layer)
    place = "all layers" if layer is None else f"layer {layer}"
    return Point(
        case=case,
        measure=partial(measure.distance, case, variant, subject, draws=1),
        label=f"{variant.label}, {case.tokens} tokens, {place}",
        series=variant.label,
        cost=float(case.tokens) ** variant.time_growth,
    )


def _timed(
    case: Case,
    variant: Variant,
    subject: Subject,
    *,
    seconds: float,
    layers: Mapping[int, str] | None,
) -> Record:
    record = measure.cost(case, variant, subject, seconds=seconds)
    return record if layers is None else with_values(record, chosen_layers=json.dumps(layers))


def _gains_s(own: Record, times: Sequence[tuple[Variant, Record]], num_layers: int) -> dict[str, float]:
    """Seconds that one replaced layer gains by label, of backends that are not clearly slower."""
    gains_s = {}
    for variant, record in times:
        if variant.backend in _BASELINES or record.status != "ok":
            continue
        if not (own.times_s and record.times_s):
            # Times of points to come are not known yet.
            gains_s[variant.label] = 0.0
        elif time_ratio(record, own).side_of_one >= 0:
            gains_s[variant.label] = (call_time(own).median - call_time(record).median) / num_layers
    return gains_s


def _best_plan(
    losses: Mapping[int, Mapping[str, float]],
    losses_of_all: Mapping[str, float],
    gains_s: Mapping[str, float],
    limit: float,
) -> Mapping[int, str]:
    """The layers that gain most: of mixed ones, and of one backend in all layers."""
    if limit <= 0:
        return {}
    whole = [label for label, loss in losses_of_all.items() if loss <= limit and label in gains_s]
    plans = [best_layers(losses, gains_s, limit), *(dict.fromkeys(losses, label) for label in whole)]
    return max(plans, key=lambda plan: sum(gains_s[label] for label in plan.values()))


def _speed(own: Record, gains_s: Mapping[str, float], layers: Mapping[int, str]) -> float | None:
    """Speed-up of the model that the gains of its layers predict."""
    if not own.times_s:
        return None
    own_s = call_time(own).median
    return own_s / (own_s - sum(gains_s[label] for label in layers.values()))


def _plan_variant(label: str, layers: Mapping[int, str], variants: Sequence[Variant]) -> Variant:
    """The backends of the layers as one variant; its option tells plans apart."""
    by_label = {variant.label: variant for variant in variants}
    target = {layer: (by_label[name].target, by_label[name].options) for layer, name in layers.items()}
    return Variant(backend=PLAN, label=label, target=target, options={"layers": json.dumps(layers)})


def _planned(
    subject: Subject,
    label: str,
    layers: Mapping[int, str],
    variants: Sequence[Variant],
    speed: float | None,
) -> Point:
    """Loss of a plan; without layers the record is the decision for none."""
    variant = _plan_variant(label, layers, variants)
    case = subject.case("swap", variant)
    return Point(
        case=case,
        measure=partial(worker.answer, case, partial(_measured_plan, case, variant, subject, layers, speed)),
        label=f"{label}, {case.tokens} tokens",
        series=OWN,
        cost=float(case.tokens),
    )


def _measured_plan(
    case: Case, variant: Variant, subject: Subject, layers: Mapping[int, str], speed: float | None
) -> Record:
    record = measure.distance(case, variant, subject, draws=1) if layers else Record(case=case)
    if record.status != "ok":
        return record
    return with_values(
        record,
        chosen_layers=json.dumps(layers),
        attached_layers=json.dumps(subject.plan(variant)),
        predicted_speed=speed,
    )
