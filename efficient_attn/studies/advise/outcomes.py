"""Outcomes of an advice for a model: precision, plans, and their verdict."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from efficient_attn.errors import DataError
from efficient_attn.limits import read_object
from efficient_attn.measure.variants import MODEL, OWN, PLAN, UNIFORM_ATTENTION
from efficient_attn.report.text import compared, interval_words, rounded, two_digits
from efficient_attn.stats.estimates import Typical, call_time, grouped, time_ratio
from efficient_attn.stats.speeds import decided
from efficient_attn.studies.advise.names import ATTENTION_BFLOAT16, BOUND, MODEL_BFLOAT16, RETRIEVAL
from efficient_attn.studies.advise.record import AdviseRecord, Targets, relative_recall
from efficient_attn.studies.swap.names import WIDTH
from efficient_attn.studies.swap.view import quantity_words

# Name of the file that `attach` takes.
LAYERS = "layers.json"

_UNFINISHED = "the measurement is incomplete"

# Least gain of uniform attention for which plans are tried, and of a plan that is worth using.
_LEAST_BOUND, _LEAST_GAIN = 1.3, 1.1

# Models that a plan is timed against: the fastest counts.
_REFERENCES = (OWN, ATTENTION_BFLOAT16, MODEL_BFLOAT16)


class Outcome(NamedTuple):
    """Outcome of an advice for a model at one length.

    Attributes:
        side: 1: a plan within the target is clearly faster; −1: none is; 0: its times leave it open; None:
            the run ended before.
        verdict: Speed and layers of the plan, or why there is none.
        plan: AdviseRecord of the plan on held-out inputs.
    """

    tokens: int
    side: int | None
    verdict: str
    plan: AdviseRecord | None


def outcomes_of(records: Sequence[AdviseRecord], targets: Targets) -> list[Outcome]:
    """One outcome per length, the shortest first."""
    outcomes = []
    for group in grouped((record for record in records if record.case.of == MODEL), "tokens"):
        ok = [record for record in group if record.status == "ok"]
        # A resumed run may choose another plan; the last one counts.
        plans = [r for r in ok if (r.case.kind, r.case.label) == ("swap", PLAN)]
        plan = plans[-1] if plans else None
        bounds = _bounds(ok)
        side, verdict = _verdict(plan, ok, bounds, targets)
        if bound := bounds.pop(UNIFORM_ATTENTION, None):
            share = 100 * max(1 - 1 / (bound.median or 1.0), 0.0)
            most = rounded(*bound[:3])
            verdict += f"; attention takes {share:.0f} % of the time, so it gains at most {most}×"
        verdict += "".join(f"; {label} {compared(speed)}" for label, speed in bounds.items())
        outcomes.append(Outcome(group[0].case.tokens, side, verdict, plan))
    return sorted(outcomes, key=lambda outcome: outcome.tokens)


def _bounds(records: Sequence[AdviseRecord]) -> dict[str, Typical]:
    """{label: speed} of the attention that bounds all gains, and of windows in sliding layers."""
    times = {record.case.label: record for record in records if record.case.kind == BOUND and record.times_s}
    models = [label for label in times if label in _REFERENCES]
    model = times.pop(models[-1], None) if models else None
    return {} if model is None else {label: time_ratio(record, model) for label, record in times.items()}


def excludes(bound: Typical) -> bool:
    """Whether even uniform attention, which bounds all gains, makes the model too little faster."""
    return bound.median <= _LEAST_BOUND


def _verdict(
    plan: AdviseRecord | None,
    records: Sequence[AdviseRecord],
    bounds: Mapping[str, Typical],
    targets: Targets,
) -> tuple[int | None, str]:
    bound = bounds.get(UNIFORM_ATTENTION)
    if plan is None:
        if bound is None or not excludes(bound):
            return None, _UNFINISHED
        if bound.median <= 1:
            return -1, "little to gain"
        # Of a text r times as long, attention takes the share r a / (r a + 1 − a) in place of a.
        gainful = records[0].case.tokens * (_LEAST_BOUND - 1) / (bound.median - 1)
        return -1, f"little to gain before about {two_digits(gainful)} tokens"
    layers = parsed_layers(plan.chosen_layers)
    if layers == {}:
        return -1, "no plan meets the target"
    if layers is None:
        return None, _UNFINISHED
    if missed := targets.missed(plan):
        return -1, f"the plan misses the target on held-out inputs ({', '.join(missed)})"
    described = _described(plan, layers, records)
    times = [r for r in records if r.times_s and r.case.kind == "time" and r.case.inputs == plan.case.inputs]
    models = [record for record in times if record.case.label in _REFERENCES]
    planned = [record for record in times if record.case.options == plan.case.options]
    if not (models and planned):
        return None, f"{_predicted(plan, bound)}, with {described}"
    fastest = min(models, key=lambda record: call_time(record).median)
    (speed,) = decided([(planned[-1], fastest)])
    over = "" if fastest.case.label == OWN else f"over the {fastest.case.label} "
    if speed.side_of_one >= 0 and speed.high is not None and speed.high < _LEAST_GAIN:
        return -1, f"{over}the best plan gains less than {_LEAST_GAIN}×, {compared(speed)}: {described}"
    if speed.side_of_one == 0:
        shown = f"~{rounded(*speed[:3])}× the speed"
        if speed.low is not None and speed.high is not None:
            shown += f" ({interval_words(*speed[:3])})"
        return 0, f"{over}{shown}, not settled, with {described}"
    return speed.side_of_one, f"{over}{compared(speed)}, with {described}"


def _predicted(plan: AdviseRecord, bound: Typical | None) -> str:
    """Speed of a plan of heads by the share of the time that attention takes, as nothing was timed."""
    window, tokens = plan.case.options.get("window"), plan.case.tokens
    if bound is None or not (plan.streaming_heads and plan.key_heads and isinstance(window, int)):
        return "the plan was not timed"
    saved = plan.streaming_heads / plan.key_heads * max(1 - window / tokens, 0.0) ** 2
    return f"~{two_digits(1 / (1 - (1 - 1 / bound.median) * saved))}× the speed, predicted"


def in_bfloat16(
    records: Sequence[AdviseRecord], quantity: str, model: Mapping[str, Any]
) -> tuple[list[str], str]:
    """Losses and speeds in bfloat16 at the longest length with the line to use it, and what to change."""
    ok = [record for record in records if record.status == "ok" and record.case.of == MODEL]
    swaps = [r for r in ok if r.case.kind == "swap" and r.case.label in _REFERENCES[1:]]
    if not swaps:
        return [], ""
    tokens, parts = max(record.case.tokens for record in swaps), []
    for swap in (record for record in swaps if record.case.tokens == tokens):
        times = [r for r in ok if r.times_s and r.case.kind == "time" and r.case.inputs == swap.case.inputs]
        models = [record for record in times if record.case.label == OWN]
        timed = [record for record in times if record.case.label == swap.case.label]
        shown = "not within the target"
        if models and timed:
            shown = compared(*decided([(timed[-1], models[-1])]))
        losses = quantity_words(quantity, getattr(swap, quantity) or 0.0)
        losses += "" if swap.loss_difference is None else f", {_losses(swap)}"
        parts.append(f"{swap.case.label} {shown}, {losses}")
    # The bound is that of the fastest model.
    bounds = {r.case.label for r in ok if (r.case.kind, r.case.tokens) == (BOUND, tokens)}
    text = f"At {tokens} tokens: {'; '.join(parts)}."
    if MODEL_BFLOAT16 in bounds:
        line = f'{model.get("class")}.from_pretrained("{model.get("model")}", dtype=torch.bfloat16)'
        return [f"{text} To load it: {line}"], "Load the model in bfloat16"
    if ATTENTION_BFLOAT16 in bounds:
        line = 'ea.attach(model, "exact", compute_dtype="bfloat16")'
        return [f"{text} To use it: {line}"], "Attach exact attention in bfloat16"
    return [text], ""


def _losses(record: AdviseRecord) -> str:
    width = WIDTH * (record.loss_difference_error or 0.0)
    text = f"loss {record.loss_difference:+.4f} ± {width:.4f} nats"
    if record.copy_recall_exact:
        text += f", copy recall {100 * relative_recall(record):.1f} % of exact"
    return text


def _described(plan: AdviseRecord, layers: Mapping[int, str], records: Sequence[AdviseRecord]) -> str:
    """`window in layers 0, 2–5`, or the number of key/value heads with a window, their loss and recall."""
    if plan.streaming_heads is None:
        return layers_in_words(layers)
    text = (
        f"a sliding window (4 first + {plan.case.options.get('window')} last tokens) in "
        f"{plan.streaming_heads} of {plan.key_heads} key/value heads: {_losses(plan)}"
    )
    for record in records:
        share, exact, error = record.retrieval, record.retrieval_exact, record.retrieval_error
        if record.case.kind == RETRIEVAL and share is not None and exact is not None and error is not None:
            text += f", {100 * share:.0f} % of planted numbers found (original {100 * exact:.0f} %, "
            text += f"difference ± {100 * WIDTH * error:.1f})"
    return text


def usable(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The longest length with a faster plan, or with a verified one that is not shown to be slower."""
    faster = [outcome for outcome in outcomes if outcome.side == 1]
    verified = [x for x in outcomes if x.side != -1 and x.plan and parsed_layers(x.plan.chosen_layers)]
    return next(reversed(faster or verified), None)


def attached_plan(outcome: Outcome) -> dict[str, Any] | None:
    """The plan as `attach` takes it, or None if it is damaged or a backend has no registered name."""
    try:
        text = "" if outcome.plan is None else outcome.plan.attached_layers or ""
        return read_object(text, "attached_layers")
    except DataError:
        return None


def parsed_layers(text: str | None) -> dict[int, str] | None:
    """{layer: label} of the field `chosen_layers`, or None if it is missing or damaged."""
    try:
        layers = read_object(text or "", "chosen_layers")
        return {int(layer): str(label) for layer, label in layers.items()}
    except (DataError, ValueError):
        return None


def layers_in_words(chosen: Mapping[int, str]) -> str:
    """`window in layers 0, 2–5 and linformer in layers 1`."""
    groups: dict[str, list[list[int]]] = {}
    for layer in sorted(chosen):
        runs = groups.setdefault(chosen[layer], [])
        if not runs or layer > runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(layer)
    ranges = {
        label: (f"{x[0]}–{x[-1]}" if x[1:] else f"{x[0]}" for x in runs) for label, runs in groups.items()
    }
    return " and ".join(f"{label} in layers {', '.join(layers)}" for label, layers in ranges.items())
