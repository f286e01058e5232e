"""A backend as an nn.Module: saving, copying, compiling, threads, no global side effects."""

import copy
import io
import os
import random
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from efficient_attn.conformance.cases import DTYPES, LARGER, TUNED, CheckCase, Inputs, both, everywhere, vary
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import Subject, agree, close, learn, results, rounding, run, same_bits
from efficient_attn.conformance.table import Check, threads

ONE = CheckCase(tokens=7)
# As many queries as keys, beyond a tile of 1024.
LONGEST = CheckCase(tokens=1030, batch=1, kv_heads=1, value_dim=3)
# Threads, and calls of each: on a busy machine few of them are interrupted.
THREADS, CALLS = 8, 16
UNUSUAL = 987_654_321
# Functions that other packages replace by faster kernels.
_FUNCTIONS = ("softmax", "matmul", "scaled_dot_product_attention", "dropout")


@Check(
    "Equal calls give equal bits, in training and in evaluation, and leave the module as it was.",
    cases=(*everywhere(1, 7), *LARGER, *both(ONE.but(tokens=300, batch=1)), *TUNED[:6:2]),
)
def the_same_call_gives_the_same_bits(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    stored = {name: x.clone() for name, x in backend.state_dict().items()}
    trained = [x.requires_grad for x in backend.parameters()]
    reference = run(backend, inputs)
    yield same_bits("A second call", run(backend, inputs), reference)
    run(backend, subject.inputs(case, variant=1))
    yield same_bits("After another call", run(backend, inputs), reference)
    yield same_bits("In training", run(backend.train(), inputs), reference)
    yield same_bits("Once more in training", run(backend, inputs), reference)
    yield Finding("Calls end the training mode", float(not backend.training), 0.0)
    yield same_bits("In evaluation again", run(backend.eval(), inputs), reference)
    yield from agree("after calls", backend.state_dict().items(), stored.items())
    changed = trained != [x.requires_grad for x in backend.parameters()]
    yield Finding("Calls change which parameters are trained", float(changed), 0.0)


@Check(
    "state_dict and dtype determine the output: an instance that loads it and a copy give the same bits.",
    cases=both(ONE, ONE.but(dtype="float32")),
)
def a_saved_state_brings_the_output_back(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    reference = run(backend, inputs)
    # Tensors that a training call leaves on the module may be part of a graph, which cannot be copied.
    results(subject, backend, inputs)
    copied = copy.deepcopy(backend)
    yield same_bits("Copied", run(copied, inputs), reference)
    learn(copied, 1)
    yield same_bits("After training of the copy", run(backend, inputs), reference)
    seed: dict[str, Any] = {"seed": 1} if subject.has_option("seed") else {}
    loaded = subject.build(case, learned=1, **seed)
    if hasattr(loaded.core, "redraw"):
        loaded.redraw(1)
    run(loaded, inputs)
    loaded.load_state_dict(backend.state_dict())
    yield same_bits("Loaded", run(loaded, inputs), reference)
    fresh = subject.build(case)
    fresh.load_state_dict(backend.state_dict())
    wide, expected = run(backend.double(), inputs.double()), run(fresh.double(), inputs.double())
    yield same_bits("In float64 after a call", wide, expected)


@Check(
    "Output and gradients under torch.compile(fullgraph=True) equal the eager ones.",
    cases=(*both(ONE), ONE.but(keys=9, masked=True, causal=True, heads=4, value_dim=3)),
    capability="compile",
)
def compiled_it_is_the_same(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    if inputs.key_mask is not None:
        # The queries of the last sequence see no key.
        inputs.key_mask[-1] = False
    torch._dynamo.reset()
    try:
        compiled: Any = torch.compile(backend, fullgraph=True, backend="aot_eager")
        bound = float(rounding(backend, inputs, case.dtype).max())
        expected = results(subject, backend, inputs)
        yield from agree("when compiled", results(subject, compiled, inputs), expected, bound)
    finally:
        torch._dynamo.reset()


@Check(
    "Calls are thread-safe: eight threads at once, and a call over two threads, give the sequential outputs.",
    cases=both(ONE, ONE.but(masked=True), ONE.but(tokens=130, batch=1)),
)
def threads_do_not_disturb_each_other(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    backend = subject.build(case)
    inputs = [subject.inputs(case.but(pattern=number), variant=number) for number in range(THREADS)]
    reference = [run(backend, x) for x in inputs]
    interval = sys.getswitchinterval()
    try:
        # Threads take turns within a call, not after it.
        sys.setswitchinterval(1e-5)
        with ThreadPoolExecutor(THREADS) as pool:
            outputs = list(pool.map(partial(run, backend), inputs * CALLS))
    finally:
        sys.setswitchinterval(interval)
    with threads(2):
        on_two = run(backend, inputs[0])
    bounds = [rounding(backend, x, case.dtype) for x in inputs]
    for number, out in enumerate(outputs):
        which = number % THREADS
        yield close(f"Call {number}", out, reference[which], bounds[which])
    yield close("On two threads", on_two, reference[0], bounds[0])


@Check(
    "Global state is unchanged, even if a call fails, and nothing is printed: generators, threads, flags.",
    cases=(
        *vary(ONE, dtype=DTYPES, causal=(False, True)),
        *both(ONE.but(masked=True), ONE.but(tokens=300, batch=1)),
        *LARGER,
    ),
    long=lambda seed: both(LONGEST, LONGEST.but(masked=True, pattern=2)),
)
def nothing_global_is_touched(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    with _usual_settings():
        for where, mode in (("A call", torch.enable_grad), ("A call under no_grad", torch.no_grad)):
            printed = io.StringIO()
            streams = redirect_stdout(printed), redirect_stderr(printed)
            with mode(), streams[0], streams[1], warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                before = _globals()
                backend = subject.build(case)
                results(subject, backend, inputs)
                run(backend.train(), inputs)
                yield from _differences(where, before, _globals())
            said = [str(entry.message) for entry in caught] + [printed.getvalue()] * bool(printed.getvalue())
            yield Finding(f"{where} says {(said or [''])[0]!r:.100}", float(bool(said)), 0.0)
        if case.dtype == "float64" and case.tokens == ONE.tokens:
            yield from _interrupted(subject, case, inputs)


def _interrupted(subject: Subject, case: CheckCase, inputs: Inputs) -> Iterator[Finding]:
    """End calls at their first, middle and last operation, as an error or Ctrl+C would."""
    backend = subject.build(case)
    expected, operations = run(backend, inputs), _Ends(None)
    with operations:
        results(subject, backend, inputs)
    for last in sorted({1, operations.count // 2, operations.count}):
        before = _globals()
        with suppress(_Ended), _Ends(last):
            results(subject, backend, inputs)
        where = f"a call that fails at operation {last}"
        yield from _differences(where.capitalize(), before, _globals())
        yield same_bits(f"The call after {where}", run(backend, inputs), expected)


class _Ended(Exception):
    """Raised by an operation in place of its result."""


class _Ends(TorchDispatchMode):
    """Dispatch mode that counts operations and raises in place of operation `last`."""

    def __init__(self, last: int | None) -> None:
        super().__init__()
        self.last, self.count = last, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.last:
            raise _Ended
        return func(*args, **(kwargs or {}))


@contextmanager
def _usual_settings() -> Iterator[None]:
    """Give torch's generator a state that no usual seed gives, and reset flags of earlier calls."""
    flushes, precision = _flushes_subnormals(), torch.get_float32_matmul_precision()
    try:
        torch.set_flush_denormal(False)
        torch.set_float32_matmul_precision("highest")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(UNUSUAL)
            yield
    finally:
        torch.set_flush_denormal(flushes)
        torch.set_float32_matmul_precision(precision)


def _flushes_subnormals() -> bool:
    # A comparison of Python's floats reads subnormal numbers as zeros as well.
    return float(torch.tensor(1e-310, dtype=torch.float64) * 1) == 0


def _globals() -> dict[str, Any]:
    cuda = torch.backends.cuda
    mode: Any = torch.utils.deterministic
    switches = {
        f"{name} of {holder}": getattr(getattr(torch.backends, holder), name, None)
        for holder in ("cudnn", "mkldnn")
        for name in ("enabled", "benchmark", "deterministic", "allow_tf32")
    }
    return switches | {
        "torch's generator": torch.get_rng_state().tolist(),
        "numpy's generator": repr(np.random.get_state()),
        "random's generator": random.getstate(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the number of threads": torch.get_num_threads(),
        "gradient mode": torch.is_grad_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "kernel flags": (cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled()),
        "flushing of subnormal numbers": _flushes_subnormals(),
        "functions of torch": [getattr(holder, name, None) for holder in (torch, F) for name in _FUNCTIONS],
        "filling of new tensors": mode.fill_uninitialized_memory,
        "environment variables": dict(os.environ),
        "warning filters": list(warnings.filters),
    }


def _differences(where: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[Finding]:
    for name, value in before.items():
        yield Finding(f"{where} changes {name}", float(after[name] != value), 0.0)
