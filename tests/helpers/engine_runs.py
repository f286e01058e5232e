"""Times and memory of variants, measured by the engine of all studies."""

import math

from small_cases import SHARED

from efficient_attn.runs.engine import Engine
from efficient_attn.runs.store import Store
from efficient_attn.runs.workload import Costs

ROUNDS = 4


def points(variants, lengths, measure, *, kinds=("time", "memory"), **costs):
    """Lists of points: for each length the times, then the memory of all variants."""
    made = Costs(shared=SHARED, measure=measure, rounds=ROUNDS, **costs)
    return [[made.point(x, tokens, kind) for x in variants] for tokens in lengths for kind in kinds]


def in_turn(lists):
    """A study of lists of points that do not depend on records."""

    def study():
        for points in lists:  # noqa: UP028  (records are sent to a generator)
            yield points

    return study


def run(lists, *, store=None, progress=None, budget_s=None, timeout_s=math.inf):
    """Whether the run was complete, and its records."""
    store = Store() if store is None else store
    engine = Engine(in_turn(lists), store, point_limit_s=timeout_s, report=progress, budget_s=budget_s)
    complete = engine.run()
    return complete, tuple(store.records.values())
