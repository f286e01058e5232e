"""Repeated calls: no call affects another, and memory and time grow as declared."""

import gc
import itertools
import math
import time
import timeit
from collections.abc import Callable, Iterator

import torch

from efficient_attn.backend import Backend
from efficient_attn.conformance.cases import LONG_KEYS, CheckCase, Inputs, both, joint
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import Named, Subject, agree, decode, learn, results, run, same_bits
from efficient_attn.conformance.table import Check, cannot_check
from efficient_attn.measure import memory

CALLS = 100
# Further calls of a small input, after which counters and logs have filled up.
MANY_CALLS = 400
# Calls before which parameters are updated in place, as an optimiser does.
UPDATES = (0, 40, 70)
ONE = CheckCase(tokens=7, batch=3, heads=4, kv_heads=2, value_dim=3, masked=True, pattern=3)


@Check(
    f"{CALLS} calls of other shapes and parameters match a fresh copy, and {MANY_CALLS} more change nothing.",
    cases=both(ONE),
    drawn=lambda seed: both(ONE.but(tokens=130, dtype="float32")),
)
def no_state_between_calls(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    # Masks, lengths and batch sizes alternate in one program.
    variants = [
        case,
        case.but(pattern=4),
        case.but(masked=False),
        case.but(tokens=case.tokens - 2, pattern=5),
        case.but(batch=1),
        case.but(value_dim=case.value_dim + 2),
        case.but(kv_heads=case.heads),
        case.but(tokens=1),
    ]
    draws = itertools.cycle([(v, subject.inputs(v, variant=n)) for n in (0, 1, 2) for v in variants])
    first, rival = (run(subject.build(case), subject.inputs(variants[0], variant=n)) for n in (0, 1))
    yield Finding("Different inputs give the same output", float(torch.equal(first, rival)), 0.0)
    if torch.equal(first, rival):
        return
    # Calls of one shape share buffers, as in a program with static inputs.
    buffers = {v: subject.inputs(v) for v in variants}
    backend, outputs = subject.build(case), list[tuple[str, list[Named], list[Named]]]()
    for shared in buffers.values():
        if shared.key_mask is not None:
            # A mask without masked tokens, which a cache of masks might take for no mask.
            shared.key_mask.fill_(True)
            run(backend, shared)
    for number, (variant, inputs) in zip(range(CALLS), draws, strict=False):
        if number in UPDATES:
            learn(backend, number)
            expected: dict[tuple[int, bool], list[Named]] = {}
        asks = subject.promises.gradients and number % 3 == 0
        named = _results(subject, backend, buffers[variant].fill(inputs), asks)
        if asks:
            named[0][1].square().sum().backward()
        # Calls without gradients may take another kernel, whose last bits differ.
        key = (id(inputs), asks)
        if key not in expected:
            fresh = subject.build(case)
            fresh.load_state_dict(backend.state_dict())
            expected[key] = [(name, x.detach()) for name, x in _results(subject, fresh, inputs, asks)]
        yield from agree(f"of call {number + 1}", named, expected[key])
        outputs.append((f"of call {number + 1} after the last call", named, expected[key]))
    for where, named, before in outputs:
        yield from agree(where, named, before)
    short = subject.inputs(variants[0].but(tokens=2, batch=1, masked=False))
    first = run(backend, short)
    for _ in range(MANY_CALLS):
        out = run(backend, short)
    yield same_bits(f"The same call {MANY_CALLS} times later", out, first)


def _results(subject: Subject, backend: Backend, inputs: Inputs, asks: bool) -> list[Named]:
    """Results of calls with these tensors themselves, which require gradients if `asks`."""
    for x in inputs[:3]:
        x.requires_grad_(asks)
    with torch.set_grad_enabled(asks):
        named = [("Output", run(backend, inputs))]
        if subject.promises.streaming and backend.problem.causal:
            _, state = backend.extend(*inputs[:3], key_mask=inputs.key_mask)
            out, _ = backend.extend(*inputs[:3], state, key_mask=inputs.key_mask)
            named.append(("Output of extend", out))
    return named


@Check(
    "Ten calls, and further lengths, leave no bytes behind, and a decoded state keeps no earlier states.",
    cases=both(ONE.but(tokens=130)),
)
def no_call_leaves_bytes_behind(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    if not case.masked:
        raise cannot_check("A function may cache tables by length.")
    backend, inputs = subject.build(case, max_tokens=2 * case.tokens), subject.inputs(case)

    def calls(less: int = 0) -> None:
        for number in range(10):
            with torch.set_grad_enabled(number % 2 == 0):
                results(subject, backend, inputs)
        with torch.no_grad():
            for tokens in range(case.tokens - less, 2, -8):
                copies = inputs.part(slice(tokens))
                run(backend, copies if tokens % 3 else copies._replace(key_mask=None))
        gc.collect()

    # The longest sequence comes first, so that a table that grows is large enough for all.
    calls()
    kept_bytes = _peak(lambda: calls(less=1)).kept_bytes
    yield Finding("Bytes that ten calls and further lengths leave", float(kept_bytes), 0.0)
    if subject.promises.streaming and case.causal:
        chain = subject.inputs(case.but(tokens=60, batch=1, masked=False))

        @torch.no_grad()
        def state_bytes(parts: list[int]) -> int:
            decode(backend, chain, parts)
            return _peak(lambda: decode(backend, chain, parts)[1]).kept_bytes

        prefilled, decoded = state_bytes([60]), state_bytes([1] * 60)
        yield Finding("Bytes of a state after single tokens", float(decoded), 4.0 * prefilled)


@Check(
    "Outputs do not alias: overwriting inputs changes no output, and overwriting an output no later call.",
    cases=both(CheckCase(tokens=1), CheckCase(tokens=1, batch=1, heads=1, kv_heads=1), CheckCase(tokens=7)),
    drawn=lambda seed: (*joint(seed, 1, 9), *LONG_KEYS),
)
def outputs_are_not_aliased(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            inputs, backend = subject.inputs(case), subject.build(case)
            copies = inputs.each(torch.clone)
            out = run(backend, copies)
            expected = out.clone()
            for x in copies[:3]:
                x.fill_(torch.nan)
            if copies.key_mask is not None:
                copies.key_mask.logical_not_()
            yield same_bits("After its inputs were overwritten", out, expected)
            later = run(backend, subject.inputs(case, variant=1)).clone()
            yield same_bits("After another call", out, expected)
            if 0 in out.stride() and out.numel() > 1:
                continue  # an expanded output is not writable
            out.fill_(torch.nan)
            yield same_bits("After an output was overwritten", run(backend, inputs), expected)
            yield same_bits("Another call then", run(backend, subject.inputs(case, variant=1)), later)


# A multiple of every block, and long enough that scores of all pairs outweigh the scratch of a block.
LONG = CheckCase(tokens=1024, batch=1, heads=1, kv_heads=1, dtype="float32")
BATCH = LONG.but(batch=2, heads=2)
# Tolerance of the exponents: for tables besides the tensors in bytes, and for CPU caches in time.
BYTES_POWER, TIME_POWER = 0.1, 0.2
# Tolerance of a single doubling, where stages bend the curve: halfway to a further √tokens.
DOUBLING_POWER = 0.25
DOUBLINGS = (1, 2, 4, 8)
REPEATS = 5


@Check(
    "Memory grows no faster than declared, forward and in training: peak bytes at each doubling of tokens.",
    cases=both(LONG),
    long=lambda seed: both(BATCH, BATCH.but(masked=True)),
)
def memory_grows_as_declared(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    growth = subject.promises.memory_growth
    lengths = _lengths(growth, case)
    for where, backward in _passes(subject):
        peaks = [_peak_bytes(subject, case.but(tokens=n), backward) for n in lengths]
        for tokens, (shorter, longer) in zip(lengths, itertools.pairwise(peaks), strict=False):
            ratio = longer / max(shorter, 1)
            at = f"bytes at {2 * tokens} tokens over those at {tokens}"
            yield Finding(f"{where}, {at}", ratio, 2.0 ** (growth + DOUBLING_POWER))
        if case.batch > 1:
            continue  # several workspaces fill up, one after the other
        added = [longer - shorter for shorter, longer in itertools.pairwise(peaks)]
        # A workspace that fills up bends the curve once; excess growth shows at every doubling.
        least = min(b / max(a, 1) for a, b in itertools.pairwise(added))
        most = 2.0 ** (growth + BYTES_POWER)
        yield Finding(f"{where}, bytes added by a doubling over the doubling before", least, most)


@Check("Time grows no faster than declared, forward and in training.", long=lambda seed: both(LONG))
def time_grows_as_declared(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    declared = subject.promises.time_growth
    shortest, *_, longest = _lengths(declared, case)
    for where, backward in _passes(subject):
        early, late = (
            timeit.repeat(call, timer=time.thread_time, number=1, repeat=REPEATS)
            for call in (_call(subject, case.but(tokens=n), backward) for n in (shortest, longest))
        )
        # The smallest exponent consistent with the samples: background load is not growth.
        power = math.log(min(late) / max(early)) / math.log(longest / shortest)
        yield Finding(
            f"{where}, exponent of the tokens from {shortest} to {longest}", power, declared + TIME_POWER
        )


def _passes(subject: Subject) -> list[tuple[str, bool]]:
    """Passes of a backend that declares its growth, and whether they compute gradients."""
    if subject.bare:
        raise cannot_check("The backend declares no growth.")
    return [("Forward", False), *([("In training", True)] if subject.promises.gradients else [])]


def _lengths(declared: int, case: CheckCase) -> list[int]:
    """Lengths long enough to measure, and short enough for the declared power."""
    return [case.tokens * n // (1 if declared == 1 else 4) for n in DOUBLINGS]


def _call(subject: Subject, case: CheckCase, backward: bool) -> Callable[[], object]:
    backend, inputs = subject.build(case), subject.inputs(case)
    leaves = [x.requires_grad_(backward) for x in inputs[:3]]

    def call() -> object:
        with torch.set_grad_enabled(backward):
            out = run(backend, inputs)
            return torch.autograd.grad(out.sum(), leaves) if backward else out

    return call


def _peak_bytes(subject: Subject, case: CheckCase, backward: bool) -> int:
    call = _call(subject, case, backward)
    # Caches that the first call fills are excluded, provided that a short call fills them.
    _call(subject, case.but(tokens=8), backward)()
    return _peak(call).peak_bytes


def _peak(call: Callable[[], object]) -> memory.Peak:
    # A collection would visit every object of torch, which takes half of the time.
    gc.freeze()
    try:
        return memory.peak(call, device="cpu")
    finally:
        gc.unfreeze()
