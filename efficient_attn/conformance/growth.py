"""How much more memory twice as many tokens take, in bytes, which have no noise."""

from collections.abc import Iterator

import torch

from efficient_attn.conformance.cases import Case, both
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import Subject, run
from efficient_attn.conformance.table import CannotCheck, check
from efficient_attn.measure import memory

# A multiple of every block, and long enough that scores of all pairs outweigh what a block takes.
LONG = Case(tokens=1024, batch=1, heads=1, kv_heads=1, dtype="float32")


@check(
    "Memory grows no faster than declared: twice the tokens, at most twice or four times the peak.",
    cases=both(LONG),
)
def memory_grows_as_declared(subject: Subject, case: Case) -> Iterator[Finding]:
    if subject.bare:
        raise CannotCheck("It declares no growth.")
    # A fixed part and blocks that are not full only make it less than that.
    once, twice = (_peak_bytes(subject, case.but(tokens=tokens)) for tokens in (case.tokens, 2 * case.tokens))
    yield Finding(
        f"Peak bytes at {2 * case.tokens} tokens over those at {case.tokens}",
        twice / max(once, 1),
        2.0**subject.promises.memory_growth,
    )


def _peak_bytes(subject: Subject, case: Case) -> int:
    backend, inputs = subject.build(case), subject.inputs(case)

    def call() -> object:
        with torch.no_grad():
            return run(backend, inputs)

    # The first call may fill caches that later calls find filled.
    call()
    return memory.peak(call, device="cpu").peak_bytes
