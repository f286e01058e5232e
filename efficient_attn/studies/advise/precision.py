"""First and last step of an advice: attention and model in bfloat16, and the speed of a plan."""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from efficient_attn.measure.clock import LOOKS
from efficient_attn.measure.variants import OWN, YARDSTICK, Variant
from efficient_attn.ops.paths import bfloat16_instructions
from efficient_attn.registry import Choice
from efficient_attn.runs.study import Point, Points
from efficient_attn.stats.estimates import OPEN, call_time, time_ratio
from efficient_attn.stats.speeds import decided
from efficient_attn.studies.advise.names import ATTENTION_BFLOAT16, MODEL_BFLOAT16
from efficient_attn.studies.advise.record import AdviseRecord, Targets
from efficient_attn.studies.swap.measure import ModelSubject, distance_point, pass_point
from efficient_attn.studies.swap.model import TextSubject
from efficient_attn.studies.swap.names import OWN_ATTENTION

_ATTENTION = Variant(
    backend=YARDSTICK, label=ATTENTION_BFLOAT16, target=YARDSTICK, options={"compute_dtype": "bfloat16"}
)
_MODEL = Variant(backend=OWN, label=MODEL_BFLOAT16, target=OWN)

# A subject with one of its variants, which is timed beside a plan.
Timed = tuple[ModelSubject, Variant]


def precision_steps(
    choosing: ModelSubject, held_out: ModelSubject, targets: Targets
) -> Generator[Point | list[Point], Any, tuple[Any, Any, Sequence[Timed]]]:
    """Measure loss and speed in bfloat16.

    Returns: Both subjects in the faster precision, and all models within the targets.
    """
    timed: list[Timed] = [(held_out, OWN_ATTENTION)]
    # On a CPU bfloat16 may be faster if there are instructions for its products.
    native = held_out.shared["device"] != "cpu" or bfloat16_instructions() != "none"
    if not (isinstance(held_out, TextSubject) and held_out.shared["dtype"] == "float32" and native):
        return choosing, held_out, timed
    lower = held_out.in_dtype(torch.bfloat16, _MODEL)
    for subject, variant in ((held_out, _ATTENTION), (lower, _MODEL)):
        record = yield distance_point(subject, variant)
        if record.status == "ok" and not targets.missed(record):
            timed.append((subject, variant))
    # One round decides, and all rounds follow with those of the plan.
    times = yield [pass_point(*each, rounds=1) for each in timed]
    gains = [time_ratio(record, times[0]).median if record.times_s else 1.0 for record in times]
    fastest, variant = timed[gains.index(max(gains))]
    if fastest is lower:
        return cast(TextSubject, choosing).in_dtype(torch.bfloat16, _MODEL), lower, timed
    if variant is _ATTENTION:
        choosing, held_out = map(_with_attention, (choosing, held_out))
    return choosing, held_out, timed


def _with_attention(subject: Any) -> TextSubject:
    """The subject with attention in bfloat16 in all layers without another backend."""
    base = {**dict.fromkeys(subject.layers, Choice(YARDSTICK, _ATTENTION.options)), **subject.base}
    return cast(TextSubject, replace(subject, base=base, original=_ATTENTION, loaded=subject))


def timing_steps(timed: Sequence[Timed], plan: Timed, rounds: int | None) -> Points:
    """Time a plan and the models, until the plan over the fastest model and this over the first are decided.

    A number of rounds takes the place of the decision.
    """
    points = [pass_point(*each) for each in (*timed, plan)]
    keys, records = [point.case.key for point in points], dict[str, AdviseRecord]()
    for look in LOOKS if rounds is None else (rounds,):
        measured = yield [replace(point, rounds=look) for point in points]
        records |= {record.case.key: record for record in measured}
        if not all(record.times_s for record in measured):
            return
        first, *others, planned = (records[key] for key in keys)
        fastest = min((first, *others), key=lambda record: call_time(record).median)
        pairs = [(planned, fastest), (fastest, first)]
        left = [pair for pair, ratio in zip(pairs, decided(pairs), strict=True) if ratio.outcome == OPEN]
        due = {record.case.key for pair in left for record in pair}
        points = [point for point in points if point.case.key in due]
