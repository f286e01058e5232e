"""Studies whose options are settled, and the points that they foresee where all of them succeed."""

from inspect import signature

from efficient_attn.runs.engine import foreseen
from efficient_attn.runs.registry import find
from efficient_attn.runs.run import prepare
from efficient_attn.runs.store import Store


def study(name, *arguments, **options):
    kind = find(name)
    requested = prepare(kind, signature(kind).bind_partial(*arguments, **options).arguments)
    assert requested.settled is not None
    return requested


def points_of(study):
    return list(foreseen(study.points(), Store(kind=study.record)).values())
