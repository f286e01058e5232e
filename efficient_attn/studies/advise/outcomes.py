"""Outcomes of an advice for a model: its plans, their verdict, and Python that uses them."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from efficient_attn.errors import DataError
from efficient_attn.limits import read_object
from efficient_attn.measure.variants import MODEL, OWN, PLAN, UNIFORM_ATTENTION
from efficient_attn.report.text import compared, rounded, skipped_note
from efficient_attn.runs.study import Run
from efficient_attn.stats.estimates import Typical, grouped, time_ratio
from efficient_attn.stats.noise_warnings import remedy
from efficient_attn.studies.advise.names import BOUND, RETRIEVAL
from efficient_attn.studies.advise.record import AdviseRecord
from efficient_attn.studies.advise.targets import AdviseSettled, Targets, relative_recall
from efficient_attn.studies.swap.names import WIDTH
from efficient_attn.studies.swap.view import quantity_words

# Name of the file that `attach` takes.
LAYERS = "layers.json"

_UNFINISHED = "the measurement is incomplete"


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
            verdict += f"; attention takes {share:.0f} % of the time, so the limit is {rounded(*bound[:3])}×"
        verdict += "".join(f"; {label} {compared(speed)}" for label, speed in bounds.items())
        outcomes.append(Outcome(group[0].case.tokens, side, verdict, plan))
    return sorted(outcomes, key=lambda outcome: outcome.tokens)


def _bounds(records: Sequence[AdviseRecord]) -> dict[str, Typical]:
    """{label: speed} of the attention that bounds all gains, and of windows in sliding layers."""
    times = {record.case.label: record for record in records if record.case.kind == BOUND and record.times_s}
    model = times.pop(OWN, None)
    return {} if model is None else {label: time_ratio(record, model) for label, record in times.items()}


def _verdict(
    plan: AdviseRecord | None,
    records: Sequence[AdviseRecord],
    bounds: Mapping[str, Typical],
    targets: Targets,
) -> tuple[int | None, str]:
    if plan is None:
        bound = bounds.get(UNIFORM_ATTENTION)
        if bound is None or (bound.median if bound.low is None else bound.low) > 1:
            return None, _UNFINISHED
        return min(bound.side_of_one, 0), "no efficient attention can make the model clearly faster"
    layers = parsed_layers(plan.chosen_layers)
    if layers == {}:
        return -1, "no plan meets the target"
    if layers is None:
        return None, _UNFINISHED
    if missed := targets.missed(plan):
        return -1, f"the plan misses the target on held-out inputs ({', '.join(missed)})"
    done = [record for record in records if record.status == "ok" and record.times_s]
    timed = [record for record in done if record.case.kind == "time"]
    times = [record for record in timed if record.case.inputs == plan.case.inputs]
    models = [record for record in times if record.case.backend == OWN]
    planned = [record for record in times if record.case.options == plan.case.options]
    if not (models and planned):
        return None, "the plan was not timed"
    speed = time_ratio(planned[-1], models[-1])
    open_ = "undecided, " if speed.low is None else ""
    return speed.side_of_one, f"{open_}{compared(speed)}, with {_described(plan, layers, records)}"


def _described(plan: AdviseRecord, layers: Mapping[int, str], records: Sequence[AdviseRecord]) -> str:
    """`window in layers 0, 2–5`, or the number of key/value heads with a window, their loss and recall."""
    if plan.streaming_heads is None:
        return layers_in_words(layers)
    window, width = plan.case.options.get("window"), WIDTH * (plan.loss_difference_error or 0.0)
    text = (
        f"a sliding window (4 first + {window} last tokens) in {plan.streaming_heads} of {plan.key_heads} "
        f"key/value heads: loss {plan.loss_difference:+.4f} ± {width:.4f} nats, "
        f"copy recall {100 * relative_recall(plan):.1f} % of exact"
    )
    for record in records:
        share, exact, error = record.retrieval, record.retrieval_exact, record.retrieval_error
        if record.case.kind == RETRIEVAL and share is not None and exact is not None and error is not None:
            text += f", {100 * share:.0f} % of planted numbers found (original {100 * exact:.0f} %, "
            text += f"difference ± {100 * WIDTH * error:.1f})"
    return text


def model_sentences(records: Sequence[AdviseRecord], run: Run[AdviseSettled]) -> list[str]:
    """The shortest length from which a plan is faster, the verdict of every length, and code for the plan."""
    targets = run.settled.target or Targets()
    outcomes = outcomes_of(records, targets)
    faster = [outcome for outcome in outcomes if outcome.side == 1]
    # A plan is faster from the first of the last lengths that all have one.
    lasting = list(takewhile(lambda outcome: outcome.side == 1, reversed(outcomes)))
    settled = ""
    if lasting:
        text = f"Faster from {lasting[-1].tokens} tokens"
    elif faster:
        text = f"Faster at {', '.join(str(outcome.tokens) for outcome in faster)} tokens only"
    elif outcomes and all(outcome.side == -1 for outcome in outcomes):
        text = "No plan is faster on this machine; keep exact attention"
    else:
        text, settled = "Undecided", f" {remedy(run.load)}"
    verdicts = "".join(f" At {outcome.tokens} tokens: {outcome.verdict}." for outcome in outcomes)
    target = quantity_words(targets.quantity, targets.limit)
    text = f"{text} (target: {target}).{verdicts}{settled}{skipped_points(records)}"
    outcome = usable(outcomes)
    if outcome is None or attached_plan(outcome) is None:
        return [text]
    # A model from a file is followed in one call; others are found by their modules.
    called = "sites" in run.settled.model
    code = f'ea.attach(model, "{LAYERS}"{", example=lambda: model(*inputs)" * called})'
    open_ = "" if outcome.side == 1 else ", within the target and not shown to be faster"
    return [text, f"To use the plan for {outcome.tokens} tokens{open_}: {code}"]


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


def skipped_points(records: Sequence[AdviseRecord]) -> str:
    """Remark on points that the budget skipped, if any."""
    # Of a resumed run the skipped plan may be another plan than the measured one.
    count = sum(record.status == "skipped" for record in records if record.case.backend != PLAN)
    return f" {skipped_note(count)}" if count else ""
