"""The advice for a model: a table over lengths, the conclusion, and the file of the plan."""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from efficient_attn.errors import DataError
from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import MODEL
from efficient_attn.report.table import Table
from efficient_attn.report.text import setting, show_ratio, three_digits
from efficient_attn.stats.noise_warnings import COULD_NOT_TELL, IDLE, disturbance
from efficient_attn.strict import read_object
from efficient_attn.studies.advise.attention_view import left_out
from efficient_attn.studies.advise.choice import in_ranges
from efficient_attn.studies.advise.shapes import HELD_OUT, SAME_AGAIN
from efficient_attn.studies.advise.verified import Verified, target, verified
from efficient_attn.studies.swap.analysis import NAMES
from efficient_attn.studies.swap.view import AUDIT_NOTE, audited_cells, show_quantity, tables_of_models
from efficient_attn.studies.view import Environment

_NONE = "–"

# Outcomes of a length, by the side of its speed.
_OUTCOMES = {1: "faster", -1: "not faster", 0: "undecided", None: "not measured to the end"}

# Name of the file that `attach`, `load` and `intercept.replace` take.
LAYERS = "layers.json"


def model_tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """The plans of all lengths, then every candidate at every length."""
    of_model = [one for one in records if one.case.of == MODEL]
    if not of_model:
        return []
    quantity, limit = target(environment)
    rows = tuple(
        (
            str(one.tokens),
            _NONE if one.share is None else f"{one.share:.0%}",
            _NONE if one.bound is None else show_ratio(one.bound),
            _NONE if one.layers is None else in_ranges(one.layers) or "none",
            _NONE
            if one.plan is None or not one.plan.predicted_speed
            else f"{three_digits(one.plan.predicted_speed)}x",
            _NONE if one.gain is None else show_ratio(one.gain),
            _NONE if one.loss is None else show_quantity(quantity, one.loss),
        )
        for one in verified(records, environment)
    )
    columns = ("tokens", "attention", "bound", "plan", "predicted speed", "verified speed", NAMES[quantity])
    note = (
        f"Target: {NAMES[quantity]} {show_quantity(quantity, limit)}. Speed: the model's own = 1. attention: "
        "its share of the time of the model; bound: speed with the mean of the values for attention, about "
        "the most that a backend can gain. verified: on held-out texts, timed in turns with the model."
    )
    case = of_model[0].case
    title = f"Plans for {case.inputs.partition(' on ')[0]}: {setting(case)}"
    done = [
        one
        for one in of_model
        if one.status != "skipped" and not one.case.inputs.endswith((HELD_OUT, SAME_AGAIN))
    ]
    return [Table(title, columns, rows, (note,)), *_audited(records, environment), *tables_of_models(done)]


def _audited(records: Sequence[Record], environment: Environment) -> list[Table]:
    """The error of the attention of each layer of the plans, on the inputs that verify them."""
    cells = {
        f"{one.tokens} tokens": {
            layer: f"{(one.layers or {}).get(layer, _NONE)}: {cell}"
            for layer, cell in audited_cells(one.plan).items()
        }
        for one in verified(records, environment)
        if one.plan is not None
    }
    layers = sorted({layer for found in cells.values() for layer in found})
    rows = tuple((str(layer), *(found.get(layer, _NONE) for found in cells.values())) for layer in layers)
    title = "Error of the attention of each layer of the plans, on the inputs that verify them"
    return [Table(title, ("layer", *cells), rows, (AUDIT_NOTE,))] if layers else []


def model_sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The shortest length from which a plan is faster within the target, and the code that uses it."""
    found, plans = verified(records, environment), _advised(records, environment)
    (quantity, limit), load = target(environment), _load(found, environment)
    tokens = found[-1].tokens if found else 0
    at = f"up to {tokens} tokens at {NAMES[quantity]} {show_quantity(quantity, limit)}"
    # A plan pays from the first of the last lengths that all have one.
    lasting = list(takewhile(lambda one: one in plans, reversed(found)))[::-1] or plans
    shown = "; ".join(_plan(one, quantity, timed=load is None) for one in (*lasting[:1], *lasting[1:][-1:]))
    if plans and load is not None:
        text = f"Within the target: {shown}. Whether that is faster: {_unclear(load)}"
    elif plans:
        start = f"From {lasting[0].tokens} tokens" if found[-1] in plans else f"At {_tokens(plans)} only"
        text = f"{start}: {shown}{_outcomes([one for one in found if one not in lasting])}"
    else:
        text = f"Nothing is known to be faster {at}{_outcomes(found)}"
        if load is not None:
            text = f"No plan {at}, by times that decide nothing: {_unclear(load)}"
        elif found and all(one.side == -1 for one in found):
            text = f"Nothing is faster on this machine {at}: stay with exact"
        text += _reasons(found, quantity, limit, timed=load is None) if found else ""
    lengths = ", ".join(str(one.tokens) for one in found if one.times or one.nearest)
    text += f". Lengths measured: {lengths or 'none'}.{left_out(records)}"
    return [text, _in_python(plans[-1], records, environment)] if plans else [text]


def _outcomes(found: Sequence[Verified]) -> str:
    """`; not faster at 512 tokens; undecided at 2048, 8192 tokens`."""
    text = ""
    for side, outcome in _OUTCOMES.items():
        if those := [one for one in found if one.side == side]:
            text += f"; {outcome} at {_tokens(those)}"
    return text


def _reasons(found: Sequence[Verified], quantity: str, limit: float, *, timed: bool) -> str:
    """The plan that missed the target, the bound, and the nearest replacement."""
    longest, text = found[-1], ""
    missed = next((one for one in found if one.layers and (one.loss or 0.0) > limit), None)
    if missed is not None:
        text += f"; the plan misses that on held-out texts: {_plan(missed, quantity, timed=False)}"
    if timed and longest.bound is not None and longest.bound.side_of_one == 1:
        text += (
            f"; attention takes about {longest.share:.0%} of the time at {longest.tokens} tokens, so a "
            f"backend can make the model at most about {three_digits(longest.bound.median)}x as fast"
        )
    if longest.nearest is not None:
        label, loss = longest.nearest
        text += f"; nearest: {label} in all layers, {NAMES[quantity]} {show_quantity(quantity, loss)}"
    return text


def _in_python(one: Verified, records: Sequence[Record], environment: Environment) -> str:
    """The lines of Python that use a plan: its file, or a mapping where a backend has no registered name."""
    origin = environment.get(MODEL)
    known = origin if isinstance(origin, Mapping) else {}
    sites, parts = known.get("sites"), known.get("parts")
    place, given = f"is in {LAYERS} of this run", f'"{LAYERS}"'
    if _attached(one) is None:
        cases = {record.case.label: record.case for record in records}
        named = sites if isinstance(sites, Mapping) else {}
        chosen = {
            named.get(str(layer), layer): (cases[label].backend, dict(cases[label].options))
            for layer, label in (one.layers or {}).items()
            if label in cases
        }
        place, given = "has a backend without a registered name", str(chosen)
    if sites is not None:
        code = (
            f"import efficient_attn; efficient_attn.intercept.replace(model, {given}, "
            "example=lambda: model(*inputs))"
        )
        if isinstance(parts, list) and parts:
            names = ", ".join(f"{name!r}: …" for name in map(str, parts))
            code += f", where model is torch.nn.ModuleDict({{{names}}}) of the modules that the call runs"
    else:
        code = f"from efficient_attn.integrations.transformers import attach; attach(model, {given})"
        if one.plan is not None and one.plan.calibrated_on is not None:
            code += "; import efficient_attn; efficient_attn.calibrate(model, **batch)"
    return f"The plan for {one.tokens} tokens {place}. In Python: {code}"


def model_files(records: Sequence[Record], environment: Environment) -> dict[str, str]:
    """The advised plan of the longest length, as `attach` and `load` take it."""
    plans = _advised(records, environment)
    attached = _attached(plans[-1]) if plans else None
    return {} if attached is None else {LAYERS: json.dumps(attached, indent=2) + "\n"}


def _attached(one: Verified) -> dict[str, Any] | None:
    """The plan as `attach` takes it; None with a backend without a registered name, or damaged."""
    try:
        return read_object("" if one.plan is None else one.plan.attached_layers or "", "attached_layers")
    except DataError:
        return None


def _load(found: Sequence[Verified], environment: Environment) -> str | None:
    return disturbance([time for one in found for time in one.times], environment)


def _advised(records: Sequence[Record], environment: Environment) -> list[Verified]:
    """Plans that are within the target on held-out texts and faster; under load speeds decide nothing."""
    found, (_, limit) = verified(records, environment), target(environment)
    if _load(found, environment) is None:
        return [one for one in found if one.side == 1]
    return [one for one in found if one.layers and one.loss is not None and one.loss <= limit]


def _tokens(found: Sequence[Verified]) -> str:
    return f"{', '.join(str(one.tokens) for one in found)} tokens"


def _unclear(load: str) -> str:
    return f"{COULD_NOT_TELL}: {load}; {IDLE}"


def _plan(one: Verified, quantity: str, *, timed: bool) -> str:
    """`1.8x as fast at 4096 tokens, cosine 0.993, with window in layers 2–5`."""
    speed = f"{show_ratio(one.gain)} as fast " if timed and one.gain is not None else ""
    loss = show_quantity(quantity, one.loss or 0.0)
    return f"{speed}at {one.tokens} tokens, {NAMES[quantity]} {loss}, with {in_ranges(one.layers or {})}"
