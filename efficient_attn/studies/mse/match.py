"""Sizes that give backends equal budgets of directions, operations, seconds or bytes.

A budget is the cost of `REFERENCE` at a number of features; every other backend gets the largest size within
the budget.
"""

from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import torch

from efficient_attn.backends import resolve
from efficient_attn.errors import UnsupportedError
from efficient_attn.measure import clock, memory
from efficient_attn.problem import AttentionProblem
from efficient_attn.runner.accuracy import at_size, directions_of, one_backend
from efficient_attn.runner.sizes import possible, with_size
from efficient_attn.runner.subject import Subject
from efficient_attn.runner.variants import Variant, select

REFERENCE = "performer-positive"

# Largest size for counted costs; measured costs are tried at powers of two.
_MOST = 1 << 14
_COUNTED = ("directions", "flops")
_CALLS = 5

Amount = Callable[[Variant, Subject, str, int], float]


class Match(NamedTuple):
    """A size, its cost, and the number of features of the reference with at least this cost."""

    size: int
    amount: float
    reference_size: int


def matched(
    variant: Variant, subject: Subject, option: str, sizes: Sequence[int], quantity: str
) -> list[Match]:
    """The largest size within each budget, without repetitions, and none below the smallest budget.

    Args:
        sizes: Numbers of features of the reference.
        quantity: `directions`, `flops`, `time` or `memory`.

    Raises:
        UnsupportedError: If the cost of the backend is unknown, or no size is within any budget.
    """
    reference, taken = _reference(), _AMOUNTS[quantity]
    tried = _sizes(variant, subject, option, _MOST if quantity in _COUNTED else 4 * max(sizes), quantity)
    found: dict[int, Match] = {}
    for size in sizes:
        budget = taken(reference, subject, "num_features", size)
        own = _largest_within(lambda one: taken(variant, subject, option, one), tried, budget)
        if variant.backend == REFERENCE:
            own = size
        if own is not None:
            found.setdefault(own, Match(own, taken(variant, subject, option, own), size))
    if not found:
        raise UnsupportedError(
            f"No size of {variant.backend!r} takes as little {quantity} as {REFERENCE!r} with "
            f"{max(sizes)} features."
        )
    return list(found.values())


def _sizes(variant: Variant, subject: Subject, option: str, most: int, quantity: str) -> list[int]:
    """Candidate sizes; a size that the backend refuses is replaced by the next one."""
    odd_or_even = {at_size(variant, subject, option, size).options[option] % 2 for size in (3, 4)}
    if quantity in _COUNTED:
        tried = [size for size in range(1, most + 1) if size % 2 in odd_or_even]
    else:
        # Windows are odd: powers of two plus one.
        more = 1 if odd_or_even == {1} else 0
        tried = [(1 << power) + more for power in range(1, most.bit_length())]
    return [size for size in tried if possible(size, tokens=subject.tokens, options=variant.options)]


def _largest_within(amount: Callable[[int], float], sizes: Sequence[int], budget: float) -> int | None:
    """The largest size within the budget, by bisection: costs rise with sizes."""
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        if amount(sizes[middle]) <= budget:
            low = middle + 1
        else:
            high = middle
    return sizes[low - 1] if low else None


@cache
def _reference() -> Variant:
    (variant,) = select([REFERENCE])
    return variant


def _directions(variant: Variant, subject: Subject, option: str, size: int) -> float:
    """Rows of the projection; ranks and windows count as they are."""
    # Two features are the minimum of every feature map.
    rows = _two_features(variant, subject, option, 2)
    return size * (rows / 2 or 1.0)


def _rows_of_two(variant: Variant, subject: Subject, option: str, size: int) -> float:
    return float(directions_of(one_backend(at_size(variant, subject, option, size), subject)) or 0)


def _flops(variant: Variant, subject: Subject, option: str, size: int) -> float:
    """Operations of the products of one head."""
    spec = resolve(variant.target)
    problem = AttentionProblem(
        head_dim=subject.head_dim, num_heads=subject.activations.q.shape[1], max_tokens=subject.tokens
    )
    options = spec.options_type(**{**variant.options, option: size})
    flops = spec.flops(problem, options, subject.tokens)
    if flops is None:
        raise UnsupportedError(f"match cannot be 'flops' for {variant.backend!r}, which counts none.")
    return float(flops)


def _time(variant: Variant, subject: Subject, option: str, size: int) -> float:
    """Median seconds of a few calls on these inputs."""
    call, time_call = _call(variant, subject, option, size), clock.clock("cpu")
    call()
    return median(time_call(call) for _ in range(_CALLS))


def _memory(variant: Variant, subject: Subject, option: str, size: int) -> float:
    """Peak bytes of a call on these inputs."""
    return float(memory.peak(_call(variant, subject, option, size), device="cpu").peak_bytes)


def _call(variant: Variant, subject: Subject, option: str, size: int) -> Callable[[], Any]:
    backend = one_backend(with_size(variant, option, size), subject)

    def call() -> Any:
        with torch.no_grad():
            return backend(*subject.activations)

    return call


def _remembered(amount: Amount) -> Amount:
    """Cache measured costs for later budgets."""
    known: dict[tuple[Any, ...], float] = {}

    def remembered(variant: Variant, subject: Subject, option: str, size: int) -> float:
        heads = subject.activations.q.shape[1]
        key = (variant.label, str(variant.target), subject.tokens, heads, subject.head_dim, size)
        if key not in known:
            known[key] = amount(variant, subject, option, size)
        return known[key]

    return remembered


_two_features = _remembered(_rows_of_two)

_AMOUNTS: dict[str, Amount] = {
    "directions": _directions,
    "flops": _remembered(_flops),
    "time": _remembered(_time),
    "memory": _remembered(_memory),
}
