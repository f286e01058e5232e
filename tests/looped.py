"""Times and memory of variants, measured by the loop of all studies."""

import math

from isolated_points import SHARED

from efficient_attn.studies.costs import cost_points
from efficient_attn.studies.loop import Loop
from efficient_attn.studies.plan import Plan

ROUNDS = 4


def points(variants, lengths, measure, **more):
    return cost_points(variants, lengths, SHARED, measure=measure, rounds=ROUNDS, **more)


def run(planned, *, emit, progress=None, budget_s=None, timeout_s=math.inf):
    """Whether the run was complete."""
    plan = Plan(points=planned, timeout_s=timeout_s)
    return Loop(plan, earlier={}, emit=emit, progress=progress, budget_s=budget_s).run()
