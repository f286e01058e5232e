"""Growth of memory and time with the number of tokens: peak bytes, which have no noise, and CPU time."""

import itertools
import math
import time
from collections.abc import Callable, Iterator

import torch

from efficient_attn.conformance.cases import Case, both
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import Subject, run
from efficient_attn.conformance.table import CannotCheck, Check
from efficient_attn.measure import memory

# A multiple of every block, and long enough that scores of all pairs outweigh the scratch of a block.
LONG = Case(tokens=1024, batch=1, heads=1, kv_heads=1, dtype="float32")
BATCH = LONG.but(batch=2, heads=2)
# Tolerance of the exponents: for tables besides the tensors in bytes, and for CPU caches in time.
BYTES_POWER, TIME_POWER = 0.1, 0.2
# Tolerance of a single doubling, where stages bend the curve: halfway to a further √tokens.
DOUBLING_POWER = 0.25
# Lengths of the long form, as multiples of the shortest.
DOUBLINGS = (1, 2, 4, 8)
REPEATS = 5


@Check(
    "Memory grows no faster than declared, forward and in training: peak bytes at twice the tokens.",
    cases=both(LONG),
)
def memory_grows_as_declared(subject: Subject, case: Case) -> Iterator[Finding]:
    _needs_growth(subject)
    # Fixed costs and partly filled blocks only lower the ratio.
    most = 2.0 ** (subject.promises.memory_growth + BYTES_POWER)
    for where, backward in _passes(subject):
        once, twice = (_peak_bytes(subject, case.but(tokens=n * case.tokens), backward) for n in (1, 2))
        ratio = twice / max(once, 1)
        yield Finding(f"{where}, bytes at {2 * case.tokens} tokens over those at {case.tokens}", ratio, most)


@Check(
    "The growth of memory is not hidden by fixed costs, nor by length: bytes at each doubling of the tokens.",
    long=lambda seed: (*both(LONG), *both(BATCH), *both(BATCH.but(masked=True))),
)
def growth_of_memory_is_not_hidden(subject: Subject, case: Case) -> Iterator[Finding]:
    _needs_growth(subject)
    growth = subject.promises.memory_growth
    most, lengths = 2.0 ** (growth + BYTES_POWER), _lengths(growth, case)
    for where, backward in _passes(subject):
        peaks = [_peak_bytes(subject, case.but(tokens=n), backward) for n in lengths]
        for tokens, (shorter, longer) in zip(lengths, itertools.pairwise(peaks), strict=False):
            ratio = longer / max(shorter, 1)
            at = f"bytes at {2 * tokens} tokens over those at {tokens}"
            yield Finding(f"{where}, {at}", ratio, 2.0 ** (growth + DOUBLING_POWER))
        whole = f"bytes at {lengths[-1]} tokens over those at {lengths[0]}"
        ratio = peaks[-1] / max(peaks[0], 1)
        yield Finding(f"{where}, {whole}", ratio, most ** (len(peaks) - 1))
        if case.batch > 1:
            continue  # several workspaces fill up, one after the other
        added = [longer - shorter for shorter, longer in itertools.pairwise(peaks)]
        # A workspace that fills up bends the curve once; excess growth shows at every doubling.
        least = min(b / max(a, 1) for a, b in itertools.pairwise(added))
        yield Finding(f"{where}, bytes added by a doubling over the doubling before", least, most)


@Check(
    "Time grows no faster than declared, forward and in training.",
    long=lambda seed: both(LONG),
)
def time_grows_as_declared(subject: Subject, case: Case) -> Iterator[Finding]:
    _needs_growth(subject)
    declared = subject.promises.time_growth
    shortest, *_, longest = _lengths(declared, case)
    for where, backward in _passes(subject):
        early, late = (
            [_seconds(call) for _ in range(REPEATS)]
            for call in (_call(subject, case.but(tokens=n), backward) for n in (shortest, longest))
        )
        # The smallest exponent consistent with the samples: background load is not growth.
        power = math.log(min(late) / max(early)) / math.log(longest / shortest)
        yield Finding(
            f"{where}, exponent of the tokens from {shortest} to {longest}", power, declared + TIME_POWER
        )


def _needs_growth(subject: Subject) -> None:
    if subject.bare:
        raise CannotCheck("The backend declares no growth.")


def _passes(subject: Subject) -> list[tuple[str, bool]]:
    return [("Forward", False), *([("In training", True)] if subject.promises.gradients else [])]


def _lengths(declared: int, case: Case) -> list[int]:
    """Lengths long enough to measure, and short enough for the declared power."""
    return [case.tokens * n // (1 if declared == 1 else 4) for n in DOUBLINGS]


def _call(subject: Subject, case: Case, backward: bool) -> Callable[[], object]:
    backend, inputs = subject.build(case), subject.inputs(case)
    leaves = [x.requires_grad_(backward) for x in inputs[:3]]

    def call() -> object:
        with torch.set_grad_enabled(backward):
            out = run(backend, inputs)
            return torch.autograd.grad(out.sum(), leaves) if backward else out

    return call


def _peak_bytes(subject: Subject, case: Case, backward: bool) -> int:
    call = _call(subject, case, backward)
    # Caches that the first call fills are excluded, provided that a short call fills them.
    _call(subject, case.but(tokens=8), backward)()
    return memory.peak(call, device="cpu").peak_bytes


def _seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start
