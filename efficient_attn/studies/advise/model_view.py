"""The advice for a model: a table over lengths, the conclusion, and the file of the plan."""

import json
from collections.abc import Sequence

from efficient_attn.report.notes import setting
from efficient_attn.report.table import Table, show_ratio, three_digits
from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MODEL
from efficient_attn.stats.noise_warnings import COULD_NOT_TELL, IDLE, disturbance
from efficient_attn.studies.advise.attention_view import left_out
from efficient_attn.studies.advise.choice import in_ranges
from efficient_attn.studies.advise.findings import HELD_OUT, PLAN
from efficient_attn.studies.advise.verified import Verified, target, verified
from efficient_attn.studies.swap.analysis import NAMES
from efficient_attn.studies.swap.view import show_quantity
from efficient_attn.studies.swap.view import tables as tables_of_swap
from efficient_attn.studies.view import Environment

_NONE = "–"

# Name of the file that `attach` and `load` take.
LAYERS = "layers.json"


def model_tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """The plans of all lengths, then every candidate at every length."""
    of_model = [one for one in records if one.case.of == MODEL]
    quantity, limit = target(environment)
    rows = tuple(
        (
            str(one.tokens),
            _NONE if one.share is None else f"{one.share:.0%}",
            _NONE if one.bound is None else show_ratio(one.bound),
            in_ranges(one.layers) or "none",
            _NONE if one.predicted is None else f"{three_digits(one.predicted)}x",
            _NONE if one.gain is None else show_ratio(one.gain),
            _NONE if one.loss is None else show_quantity(quantity, one.loss),
        )
        for one in verified(records, environment)
    )
    columns = ("tokens", "attention", "bound", "plan", "predicted speed", "verified speed", NAMES[quantity])
    note = (
        f"Target: {NAMES[quantity]} {show_quantity(quantity, limit)}. Speed: the model's own = 1. attention: "
        "its share of the time of the model; bound: speed with the mean of the values for attention, which "
        "no backend can exceed. verified: on held-out texts, timed in turns with the model."
    )
    case = of_model[0].case
    title = f"Plans for {case.inputs.partition(' on ')[0]}: {setting(case)}"
    done = [one for one in of_model if one.status != "skipped" and not one.case.inputs.endswith(HELD_OUT)]
    return [Table(title, columns, rows, (note,)), *tables_of_swap(done, environment)]


def model_sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The shortest length from which a plan is faster within the target, and the code that uses it."""
    found = verified(records, environment)
    if not found:
        return []
    quantity, limit = target(environment)
    load, plans = _load(found, environment), _advised(found, environment)
    lengths = ", ".join(str(one.tokens) for one in found)
    measured = f"Lengths measured: {lengths}.{left_out(records)}"
    if plans:
        shown = "; ".join(_plan(one, quantity, timed=load is None) for one in (plans[0], *plans[1:][-1:]))
        text = f"From {plans[0].tokens} tokens: {shown}. {measured}"
        if load is not None:
            text = f"Within the target: {shown}. Whether that is faster: {_unclear(load)}. {measured}"
        code = f'from efficient_attn.integrations.transformers import attach; attach(model, "{LAYERS}")'
        return [text, f"The plan for {plans[-1].tokens} tokens is in {LAYERS} of this run. In Python: {code}"]
    longest = found[-1]
    at = f"up to {longest.tokens} tokens at {NAMES[quantity]} {show_quantity(quantity, limit)}"
    text = f"Nothing is faster on this machine {at}: stay with exact"
    if load is not None:
        text = f"No plan {at}, by times that decide nothing: {_unclear(load)}"
    missed = next((one for one in found if one.layers and (one.loss or 0.0) > limit), None)
    if missed is not None:
        text += f"; the plan misses that on held-out texts: {_plan(missed, quantity, timed=False)}"
    if load is None and longest.bound is not None:
        text += (
            f"; attention takes {longest.share:.0%} of the time at {longest.tokens} tokens, so no backend "
            f"can make the model more than {three_digits(longest.bound.median)}x as fast"
        )
    if longest.nearest is not None:
        label, loss = longest.nearest
        text += f"; nearest: {label} in all layers, {NAMES[quantity]} {show_quantity(quantity, loss)}"
    return [f"{text}. {measured}"]


def model_files(records: Sequence[Record], environment: Environment) -> dict[str, str]:
    """The advised plan of the longest length, as `attach` and `load` take it."""
    plans = _advised(verified(records, environment), environment)
    if not plans:
        return {}
    verifying = [one for one in records if one.case.label == PLAN and one.case.kind == "swap"]
    attached = {one.case.tokens: one.attached_layers or "{}" for one in verifying}
    return {LAYERS: json.dumps(json.loads(attached[plans[-1].tokens]), indent=2) + "\n"}


def _load(found: Sequence[Verified], environment: Environment) -> str | None:
    return disturbance([time for one in found for time in one.times], environment)


def _advised(found: Sequence[Verified], environment: Environment) -> list[Verified]:
    """Plans that are within the target on held-out texts and faster; under load speeds decide nothing."""
    _, limit = target(environment)
    kept = [one for one in found if one.layers and one.loss is not None and one.loss <= limit]
    loaded = _load(found, environment) is not None
    return [one for one in kept if loaded or (one.gain is not None and one.gain.side_of_one == 1)]


def _unclear(load: str) -> str:
    return f"{COULD_NOT_TELL}: {load}; {IDLE}"


def _plan(one: Verified, quantity: str, *, timed: bool) -> str:
    """`1.8x as fast at 4096 tokens, cosine 0.993, with window in layers 2–5`."""
    speed = f"{show_ratio(one.gain)} as fast " if timed and one.gain is not None else ""
    loss = show_quantity(quantity, one.loss or 0.0)
    return f"{speed}at {one.tokens} tokens, {NAMES[quantity]} {loss}, with {in_ranges(one.layers)}"
