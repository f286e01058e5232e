"""Outcomes of an advice for a model: its plans, their speed and loss, and Python that uses them."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from efficient_attn.errors import DataError
from efficient_attn.limits import read_object
from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import MODEL, OWN, PLAN, UNIFORM_ATTENTION
from efficient_attn.report.text import compared, rounded, skipped_notes
from efficient_attn.stats.estimates import Typical, grouped, time_ratio
from efficient_attn.stats.noise_warnings import remedy
from efficient_attn.studies.advise.plan import BOUND, LIMIT, LOSSLESS, RANDOM_HEADS, RETRIEVAL, SLIDING
from efficient_attn.studies.swap.plan import KL, MEAN_POOL, OUTPUT_COSINE
from efficient_attn.studies.swap.view import quantity_words
from efficient_attn.studies.view import Environment

# Name of the file that `attach` and `intercept.replace` take.
LAYERS = "layers.json"

# Losses below this are rounding of float32.
_ROUNDING = 1e-8


# Share of the recall of exact attention that the lower end of an interval must reach to settle it.
_SETTLED = 0.95
# Standard errors from the mean to the upper end of an interval.
_UPPER = 1.96


class Targets(NamedTuple):
    """What a plan of heads must keep.

    Attributes:
        kl: Largest divergence of the next token, nats.
        loss: Largest upper end of the interval of the loss difference, nats.
        recall: Smallest share of the recall of exact attention.
    """

    kl: float
    loss: float
    recall: float

    def halved(self) -> "Targets":
        """Half of each allowance, for the texts that choose: on others a plan does less well."""
        return Targets(self.kl / 2, self.loss / 2, (1 + self.recall) / 2)

    def missed(self, record: Record) -> list[str]:
        """Names of the targets that a record misses."""
        loss = record.loss_difference, record.loss_difference_error
        upper_loss = None if None in loss else loss[0] + _UPPER * loss[1]
        bounds = (
            ("divergence", record.next_token_kl, self.kl),
            ("loss", upper_loss, self.loss),
            ("recall", -recall_share(record), -self.recall),
        )
        return [name for name, value, most in bounds if value is None or not value <= most]


def recall_share(record: Record) -> float:
    """Recall of copies over that of exact attention; 0 where exact attention recalls nothing."""
    if record.copy_recall is None or not record.copy_recall_exact:
        return 0.0
    return record.copy_recall / record.copy_recall_exact


class Outcome(NamedTuple):
    """Outcome of an advice for a model at one length.

    Attributes:
        side: 1: the plan is within the target and clearly faster; −1: no attention is clearly faster, there
            is no plan, it misses the target, or it is clearly slower; 0: its times leave it open; None: the
            run ended before.
        text: Speed, loss and layers of the plan, or why there is none.
        plan: Record of the plan on held-out inputs.
    """

    tokens: int
    side: int | None
    text: str
    plan: Record | None


def _target(environment: Mapping[str, Any]) -> tuple[str, Targets]:
    """Quantity of the loss, and the targets; its limit is the first."""
    entry = environment.get(LIMIT)
    entry = entry if isinstance(entry, Mapping) else {}
    quantity = entry.get("quantity")
    targets = (_number(entry.get(name)) for name in ("limit", "max_loss", "min_recall"))
    return quantity if quantity in (KL, OUTPUT_COSINE) else MEAN_POOL, Targets(*targets)


def _number(value: Any) -> float:
    """A target, 0 if it is missing or damaged."""
    sound = isinstance(value, (int, float)) and 0 <= value <= sys.float_info.max
    return float(value) if sound else 0.0


def outcomes_of(records: Sequence[Record], environment: Mapping[str, Any]) -> list[Outcome]:
    """One outcome per length, the shortest first."""
    quantity, targets = _target(environment)
    outcomes = []
    for group in grouped((record for record in records if record.case.of == MODEL), "tokens"):
        tokens, ok = group[0].case.tokens, [record for record in group if record.status == "ok"]
        of_heads = _outcome_of_heads(tokens, ok, targets)
        outcomes.append(of_heads or _outcome(tokens, ok, quantity, targets.kl))
    return sorted(outcomes, key=lambda outcome: outcome.tokens)


def _show_recall(record: Record) -> str:
    """`99.1 ± 1.8 % of exact`, and whether its lower end leaves the recall open."""
    if not record.copy_recall_exact or record.copy_recall_error is None:
        return "not measured"
    share, width = recall_share(record), _UPPER * record.copy_recall_error / record.copy_recall_exact
    open_ = " (not settled)" if share >= _SETTLED > share - width else ""
    return f"{100 * share:.1f} ± {100 * width:.1f} % of exact{open_}"


def _outcome_of_heads(tokens: int, records: Sequence[Record], targets: Targets) -> Outcome | None:
    """The outcome of a plan of key heads; None if there is none."""
    plans = [
        record for record in records if record.case.kind == "swap" and record.streaming_heads is not None
    ]
    plan = next((record for record in reversed(plans) if record.case.label == PLAN), None)
    if plan is None or not plan.streaming_heads:
        return None
    if not _is_measured(plan):
        return Outcome(tokens, None, "not measured to the end", plan)
    missed = targets.missed(plan)
    side, text = _verification(plan, records, None, misses=bool(missed))
    text += f" ({', '.join(missed)})" if missed else ""
    window = plan.case.options.get("window")
    ranked = f" (window {window}, ranked by the {plan.ranked_by})" if plan.ranked_by else ""
    text += (
        f", with {plan.streaming_heads} of {plan.key_heads} key heads streaming{ranked}: "
        f"loss {plan.loss_difference:+.4f} ± {_UPPER * plan.loss_difference_error:.4f} nats, "
        f"divergence {plan.next_token_kl:.2g}, copy recall {_show_recall(plan)}"
    )
    chance = next((record for record in reversed(plans) if record.case.label == RANDOM_HEADS), None)
    if chance is not None and _is_measured(chance):
        text += (
            f"; as many random heads: divergence {chance.next_token_kl:.2g}, recall {_show_recall(chance)}"
        )
    retrieval = next((record for record in records if record.case.kind == RETRIEVAL), None)
    shares = ("retrieval", "retrieval_exact", "retrieval_error")
    if retrieval is not None and all(getattr(retrieval, name) is not None for name in shares):
        width = 100 * _UPPER * retrieval.retrieval_error
        text += (
            f"; of {retrieval.numbers} numbers planted in a text it finds {100 * retrieval.retrieval:.0f} %, "
            f"the model {100 * retrieval.retrieval_exact:.0f} % (difference ± {width:.1f} points)"
        )
    return Outcome(tokens, side, text if side == 1 else text + _bound_text(_bounds(records)), plan)


def _bounds(records: Sequence[Record]) -> dict[str, Typical]:
    """{label: speed} of the times that bound all gains, over the model's own attention."""
    bounds = {record.case.label: record for record in records if record.case.kind == BOUND and record.times_s}
    return {label: time_ratio(record, bounds[OWN]) for label, record in bounds.items() if OWN in bounds}


def _bound_text(speeds: Mapping[str, Typical]) -> str:
    """Share of attention in the time of the model, and the largest possible gain; empty if not measured."""
    bound = speeds.get(UNIFORM_ATTENTION)
    if bound is None:
        return ""
    share = max(1 - 1 / (bound.median or 1.0), 0.0)
    return f"; attention takes {100 * share:.0f} % of the time, so at most {rounded(*bound[:3])}×"


def _is_measured(plan: Record) -> bool:
    """Whether the loss of a plan of heads is a number; it is none if the outputs are not finite."""
    names = (KL, "loss_difference", "loss_difference_error")
    return all(getattr(plan, name) is not None for name in names)


def _outcome(tokens: int, records: Sequence[Record], quantity: str, limit: float) -> Outcome:
    swaps = [record for record in records if record.case.kind == "swap" and record.case.layer is None]
    # A resumed run may choose another plan; the last one counts.
    plan = next((record for record in reversed(swaps) if record.case.label == PLAN), None)
    layers = None if plan is None else parsed_layers(plan.chosen_layers)
    loss = None if plan is None else getattr(plan, quantity)
    speeds = _bounds(records)
    bound = speeds.get(UNIFORM_ATTENTION)
    side: int | None = None
    text = "not measured to the end"
    if plan is not None and layers and loss is not None:
        lossless = speeds.get(LOSSLESS) if {*layers.values()} == {SLIDING} else None
        side, text = _verification(plan, records, lossless, misses=loss > limit)
        text += f", {quantity_words(quantity, loss)}, with {in_ranges(layers)}"
    elif layers == {}:
        side, text = -1, "no plan"
    elif plan is None and bound is not None and bound.low is not None and bound.low <= 1:
        side, text = min(bound.side_of_one, 0), "even uniform attention is not clearly faster"
    if LOSSLESS in speeds:
        text += f"; with windows in its sliding layers alone {compared(speeds[LOSSLESS])}"
    text += "" if side == 1 else _bound_text(speeds)
    losses = [
        (value, record.case.label)
        for record in swaps
        if record.case.backend not in (UNIFORM_ATTENTION, PLAN)
        and (value := getattr(record, quantity)) is not None
        and value > _ROUNDING
    ]
    if losses and not layers:
        value, label = min(losses)
        text += f"; nearest: {label} in all layers, {quantity_words(quantity, value)}"
    return Outcome(tokens, side, text, plan)


def _verification(
    plan: Record, records: Sequence[Record], lossless: Typical | None, *, misses: bool
) -> tuple[int | None, str]:
    """Side and words of the speed of a plan on held-out inputs, of windows alone on the choosing ones too."""
    times = [record for record in records if is_time(record) and record.case.inputs == plan.case.inputs]
    models = [record for record in times if record.case.backend == OWN]
    planned = [record for record in times if record.case.options == plan.case.options]
    if misses:
        return -1, "the plan misses the target on held-out inputs"
    gain = time_ratio(planned[-1], models[-1]) if models and planned else lossless
    if gain is None:
        return None, "not timed"
    open_ = "undecided: " if gain.low is None else ""
    return gain.side_of_one, f"{open_}{compared(gain)}"


def model_sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The shortest length from which a plan is faster, the outcome of every length, and code for the plan."""
    outcomes, (quantity, targets) = outcomes_of(records, environment), _target(environment)
    faster = [outcome for outcome in outcomes if outcome.side == 1]
    # A plan pays from the first of the last lengths that all have one.
    lasting = list(takewhile(lambda outcome: outcome.side == 1, reversed(outcomes)))
    settled = ""
    if lasting:
        text = f"Faster from {lasting[-1].tokens} tokens"
    elif faster:
        text = f"Faster at {listed(str(outcome.tokens) for outcome in faster)} tokens only"
    elif outcomes and all(outcome.side == -1 for outcome in outcomes):
        text = "Nothing is faster on this machine: stay with exact"
    else:
        text, settled = "Undecided", f" {remedy(environment)}"
    text = f"{text} ({quantity_words(quantity, targets.kl)})."
    for outcome in outcomes:
        text += f" At {outcome.tokens} tokens {outcome.text}."
    text += settled + skipped_note(records)
    return [text, _in_python(faster[-1], environment)] if faster else [text]


def _in_python(outcome: Outcome, environment: Environment) -> str:
    """The lines of Python that use a plan: its file, or a mapping where a backend has no registered name."""
    origin = environment.get(MODEL)
    origin = origin if isinstance(origin, Mapping) else {}
    request = f'"{LAYERS}"' if attached_plan(outcome) else "{layer: (backend, options), …}"
    if origin.get("sites") is not None:
        replace = f"efficient_attn.intercept.replace(model, {request}, example=lambda: model(*inputs))"
        code = f"import efficient_attn; {replace}"
    else:
        code = f"from efficient_attn.integrations.transformers import attach; attach(model, {request})"
        if outcome.plan is not None and outcome.plan.calibrated_on is not None:
            code += "; import efficient_attn; efficient_attn.calibrate(model, **batch)"
    return f"The plan for {outcome.tokens} tokens in Python: {code}"


def attached_plan(outcome: Outcome) -> dict[str, Any] | None:
    """The plan as `attach` takes it; None with a backend without a registered name, or damaged."""
    try:
        text = "" if outcome.plan is None else outcome.plan.attached_layers or ""
        return read_object(text, "attached_layers")
    except DataError:
        return None


def parsed_layers(text: str | None) -> dict[int, str] | None:
    """{layer: label} of the field `chosen_layers`; None if it is missing or damaged."""
    try:
        layers = {int(layer): label for layer, label in json.loads(text or "null").items()}
    except (ValueError, AttributeError, RecursionError):
        return None
    return layers if all(isinstance(label, str) for label in layers.values()) else None


def in_ranges(chosen: Mapping[int, str]) -> str:
    """`window in layers 0, 2–5 and linformer in layer 1`."""
    groups: dict[str, list[list[int]]] = {}
    for layer in sorted(chosen):
        runs = groups.setdefault(chosen[layer], [])
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    texts = []
    for label, runs in groups.items():
        ranges = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
        texts.append(f"{label} in layer{'s' if sum(map(len, runs)) > 1 else ''} {ranges}")
    return " and ".join(texts)


def is_time(record: Record) -> bool:
    return record.case.kind == "time" and record.status == "ok" and bool(record.times_s)


def listed(texts: Iterable[str]) -> str:
    """`512, 2048 and 4096`."""
    *first, last = [*texts] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def skipped_note(records: Sequence[Record]) -> str:
    """A remark on points that did not fit; empty if all did."""
    # Of a resumed run the skipped plan may be another plan than the measured one.
    count = sum(record.status == "skipped" for record in records if record.case.backend != PLAN)
    return "".join(f" {note}" for note in skipped_notes(count))
