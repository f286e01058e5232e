"""Checks of refusals: unpromised capabilities and invalid arguments raise errors, and none is ignored."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.backends import build
from efficient_attn.conformance.cases import DTYPES, CheckCase, both
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import Subject, agree, run
from efficient_attn.conformance.table import Check
from efficient_attn.distributed.calls import in_force
from efficient_attn.distributed.layout import Layout
from efficient_attn.errors import (
    AttentionError,
    CalibrationError,
    DataError,
    DtypeError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)

ONE = CheckCase(tokens=5)
Wrong = tuple[str, str, type[AttentionError], Callable[[], Any]]


@Check(
    "Unpromised capabilities and invalid arguments are refused with a one-line error that names them.",
    cases=(ONE,),
)
def what_is_not_promised_is_refused(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    for request, word, kind, call in (*_unpromised(subject, case), *_wrong(subject, case)):
        yield _refusal(request, word, kind, call)


def _unpromised(subject: Subject, case: CheckCase) -> Iterator[Wrong]:
    can, (q, k, v, _) = subject.promises, subject.inputs(case)
    backend = subject.build(case)
    mask = torch.ones(case.batch, case.k_tokens, dtype=torch.bool)
    longer = subject.inputs(case.but(keys=8))
    if not can.causal:
        yield "causal=True", "causal", UnsupportedError, lambda: subject.build(case.but(causal=True))
    if not can.cross:
        yield "more keys than queries", "queries", UnsupportedError, lambda: backend(q, longer.k, longer.v)
    if can.needs_all_queries and can.causal:
        causal = subject.build(case.but(causal=True))
        fewer = "fewer queries than keys"
        yield fewer, "queries", UnsupportedError, lambda: causal(q, longer.k, longer.v)
    if not can.key_mask:
        yield "a key mask", "key_mask", UnsupportedError, lambda: backend(q, k, v, key_mask=mask)
    if not can.streaming and can.causal:
        causal = subject.build(case.but(causal=True))
        yield "extend", "extend", UnsupportedError, lambda: causal.extend(q, k, v)
    if can.sharded is None:
        call = partial(_alone, backend, q)
        yield "a sequence over several ranks", "context_parallel", UnsupportedError, call
    yield "extend without causality", "causal", UnsupportedError, lambda: backend.extend(q, k, v)
    if can.needs_max_tokens:
        few = {"head_dim": case.head_dim, **subject.options}
        yield "no max_tokens", "max_tokens", UnsupportedError, lambda: build(subject.spec, **few)
        many = subject.inputs(case.but(tokens=99))
        yield "more than max_tokens", "tokens", ShapeError, lambda: backend(*many[:3])
    for name in sorted({*DTYPES} - set(can.dtypes)):
        converted = [x.to(getattr(torch, name)) for x in (q, k, v)]
        yield name, name, DtypeError, partial(backend, *converted)


def _alone(backend: Backend, q: Tensor) -> Tensor:
    with in_force(Layout("", "contiguous", 0, 2)):
        return backend(q, q, q)


def _wrong(subject: Subject, case: CheckCase) -> Iterator[Wrong]:
    q, k, v, _ = subject.inputs(case)
    backend = subject.build(case)
    heads = subject.inputs(case.but(heads=3, kv_heads=2))
    yield "an unknown option", "colour", UnknownNameError, lambda: subject.build(case, colour=1)
    yield "an unknown argument", "attn_mask", UnknownNameError, lambda: backend(q, k, v, attn_mask=None)
    yield "three axes", "q", ShapeError, lambda: backend(q[0], k, v)
    yield "another head_dim", "head_dim", ShapeError, lambda: backend(q[..., :2], k, v)
    yield "another number of values", "v", ShapeError, lambda: backend(q, k, v[:, :, :3])
    yield "another batch", "batch", ShapeError, lambda: backend(q, k[:1], v[:1])
    yield "heads that do not divide", "heads", ShapeError, lambda: backend(*heads[:3])
    yield "two dtypes", "k is", DtypeError, lambda: backend(q, k.float(), v)
    yield "whole numbers", "q is", DtypeError, lambda: backend(q.long(), k.long(), v.long())
    yield "a list", "q is", DtypeError, lambda: backend(q.tolist(), k, v)
    if subject.promises.causal:
        call = partial(subject.build(case.but(causal=True)), q, k[:, :, :2], v[:, :, :2])
        yield "more causal queries than keys", "queries", ShapeError, call
    if subject.promises.key_mask:
        right = torch.ones(case.batch, case.k_tokens)
        for name, mask, kind in (
            ("a mask of numbers", right, DtypeError),
            ("a mask of 0 and 1", right.long(), DtypeError),
            ("a mask of another length", right.bool()[:, 1:], ShapeError),
            ("a mask of four axes", right.bool()[:, None, None], ShapeError),
        ):
            yield name, "key_mask", kind, partial(backend, q, k, v, key_mask=mask)


@Check(
    "Calibration is explicit: required before the first call, and changed by no other call.",
    cases=both(ONE.but(masked=True)),
)
def calibration_is_an_explicit_act(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case, calibrated=False)
    q, k, v, mask = inputs
    if not subject.promises.needs_calibration:
        if not hasattr(backend.core, "calibrate"):
            call = partial(backend.calibrate, q, k, v)
            yield _refusal("calibrate", "nothing to calibrate", UnsupportedError, call)
        return
    yield _refusal("an output", "backend.calibrate", CalibrationError, partial(run, backend, inputs))
    broken = q.clone().index_fill_(2, torch.tensor([1]), math.nan)
    yield _refusal("calibrate", "q holds", DataError, partial(backend.calibrate, broken, k, v, key_mask=mask))
    backend.calibrate(q, k, v, key_mask=mask)
    before = {name: x.clone() for name, x in backend.state_dict().items()}
    run(backend.train(), subject.inputs(case, variant=1))
    yield from agree("after a call", backend.state_dict().items(), before.items())
    if mask is not None:
        backend.calibrate(*inputs.padded(math.nan)[:3], key_mask=mask)
        yield from agree("calibrated with masked keys of NaN", backend.state_dict().items(), before.items())


def _refusal(request: str, word: str, kind: type[AttentionError], call: Callable[[], Any]) -> Finding:
    try:
        call()
    except kind as error:
        clear = word in str(error) and "\n" not in str(error)
        return Finding(f"Asked for {request}: error {str(error)!r} lacks {word!r}", float(not clear), 0.0)
    except Exception as error:
        return Finding(f"Asked for {request}: {type(error).__name__} instead of {kind.__name__}", 1.0, 0.0)
    return Finding(f"Asked for {request}: no error", 1.0, 0.0)
