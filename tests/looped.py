"""Times and memory of variants, measured by the engine of all studies."""

import math
from functools import partial

from isolated_points import SHARED

from efficient_attn.studies.engine import Engine
from efficient_attn.studies.run_folder import Store
from efficient_attn.studies.study import Plan, in_lists
from efficient_attn.studies.workload import Costs

ROUNDS = 4


def points(variants, lengths, measure, *, kinds=("time", "memory"), **costs):
    """Lists of points: for each length the times, then the memory of all variants."""
    made = Costs(shared=SHARED, measure=measure, rounds=ROUNDS, **costs)
    return [[made.point(x, tokens, kind) for x in variants] for tokens in lengths for kind in kinds]


def run(lists, *, store=None, progress=None, budget_s=None, timeout_s=math.inf):
    """Whether the run was complete, and its records."""
    store = Store() if store is None else store
    plan = Plan(steps=partial(in_lists, lists), timeout_s=timeout_s)
    complete = Engine(plan, store, report=progress, budget_s=budget_s).run()
    return complete, tuple(store.records.values())
