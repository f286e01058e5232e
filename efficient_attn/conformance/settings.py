"""Global settings that must not affect results: default dtype, modes, seeds, layouts, warnings."""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.conformance.cases import (
    HALF,
    HEAD_SIZES,
    LARGER,
    LAYOUTS,
    CheckCase,
    Inputs,
    both,
    joint,
    vary,
)
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import (
    Named,
    Subject,
    agree,
    close,
    gradients,
    results,
    rounding,
    run,
    same_bits,
    takes_scale,
)
from efficient_attn.conformance.table import Check, cannot_check
from efficient_attn.errors import AttentionError
from efficient_attn.measure.memory import tensors_in

ONE = CheckCase(tokens=7, value_dim=3)
# Powers of two, which cause no rounding: loss scaling, and gradients of a mean over many tokens.
FLOWING = (2.0**20, 2.0**-40)
KINDS = both(ONE, ONE.but(masked=True), ONE.but(dtype="float32"))


@Check(
    "Default dtype and device, omitted sizes and global random state affect no result, also in training.",
    cases=(*KINDS, *LARGER, ONE.but(tokens=200), *vary(ONE, dtype=HALF, causal=(False, True))),
)
def global_settings_change_nothing(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, usual, before = subject.inputs(case), subject.build(case), torch.get_default_dtype()
    expected = results(subject, usual, inputs)
    # In half precision a calibrated map differs in its last bits under another default.
    defaults = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    # Plain functions create positions in the default dtype and on the default device.
    for dtype in () if case.dtype in HALF or subject.position_dependent else defaults:
        try:
            torch.set_default_dtype(dtype)
            backend = subject.build(case)
            # Parameters may be initialised in the default dtype, as in torch.nn.
            backend.load_state_dict(usual.state_dict())
            got = results(subject, backend, inputs)
        finally:
            torch.set_default_dtype(before)
        yield from agree(f"with {dtype} as default", got, expected)
    device = "cpu" if subject.position_dependent else "meta"
    with torch.device(device):
        got = results(subject, usual, inputs)
    yield from agree(f"with {device} as default device", got, expected)
    with suppress(AttentionError):  # options may need sizes
        sizeless = subject.build(case, sized=False)
        if all(x.shape == usual.state_dict()[name].shape for name, x in sizeless.state_dict().items()):
            sizeless.load_state_dict(usual.state_dict())
            yield from agree("without num_heads and max_tokens", results(subject, sizeless, inputs), expected)
    for seed in (0, 1):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            got = results(subject, usual.train(), inputs)
        yield from agree(f"in training with the global seed {seed}", got, expected)


@Check(
    "Inference mode, no_grad, autocast and uninitialised memory affect neither the output nor later calls.",
    cases=(
        *KINDS,
        *LARGER,
        *both(ONE.but(tokens=300, batch=1), ONE.but(tokens=65), ONE.but(dtype="bfloat16")),
    ),
    drawn=lambda seed: joint(seed, 9, 70),
)
def modes_change_nothing(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend, _, bound = subject.plain_call(case)
    expected, most = results(subject, backend, inputs), float(bound.max())
    # Torch itself joins no tensors of bfloat16 under autocast to float16.
    for dtype in (torch.bfloat16, torch.float16)[: 1 if case.dtype == "bfloat16" else 2]:
        actual = results(subject, backend, inputs, torch.autocast("cpu", dtype=dtype))
        yield from agree(f"under {dtype}", actual, expected, most)
    with _filled_memory():
        actual = results(subject, backend, inputs)
    yield from agree("in filled memory", actual, expected, most)
    mode: Callable[[], AbstractContextManager[object]]
    for mode in (torch.inference_mode, torch.no_grad):
        backend = subject.build(case)
        with mode():
            out = run(backend, inputs.each(Tensor.clone))
        # A call without gradients may take another kernel.
        yield close(f"Output in {mode.__name__}", out.clone(), expected[0][1], bound)
        # A tensor cached in that mode could not be saved for a backward pass.
        yield from agree(f"after {mode.__name__}", results(subject, backend, inputs), expected)


@contextmanager
def _filled_memory() -> Iterator[None]:
    """Context in which torch fills new tensors with NaN, as its deterministic mode does."""
    mode: Any = torch.utils.deterministic
    filled, enabled = mode.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        mode.fill_uninitialized_memory = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        mode.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(enabled, warn_only=warns)


@Check(
    "Without gradient mode, or without tensors that require gradients, outputs and states keep no graph.",
    cases=both(ONE, ONE.but(tokens=70, masked=True), ONE.but(dtype="float16"), ONE.but(tokens=300, batch=1)),
)
def no_graph_is_kept_unasked(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    backend, plain = subject.build(case), subject.inputs(case)
    with torch.no_grad():
        asking = plain.of(*(x.clone().requires_grad_() for x in plain[:3]))
        yield from _graphs("under no_grad", subject, backend, asking)
    backend.requires_grad_(False)
    yield from _graphs("of inputs that require none", subject, backend, plain)
    for passes in ("forward", "backward")[: 1 + subject.promises.gradients]:
        with torch.set_grad_enabled(passes == "backward"):
            traced = plain.of(*(2 * x.clone().requires_grad_(passes == "backward") for x in plain[:3]))
            traced = traced.each(torch.clone)
            out = run(backend, traced)
            flowing = torch.ones_like(out)
            if passes == "backward":
                out.backward(flowing)
        alive = {name: weakref.ref(x) for name, x in traced._asdict().items() if x is not None}
        alive |= {"the output": weakref.ref(out), "the upstream gradient": weakref.ref(flowing)}
        del traced, out, flowing
        if any(reference() is not None for reference in alive.values()):
            gc.collect()
        for name, reference in alive.items():
            yield Finding(f"After a {passes} pass, {name} lives on", float(reference() is not None), 0.0)


def _graphs(where: str, subject: Subject, backend: Backend, inputs: Inputs) -> Iterator[Finding]:
    """Whether the output, and two states with their outputs, require gradients."""
    yield Finding(f"The output requires a gradient {where}", float(run(backend, inputs).requires_grad), 0.0)
    if subject.promises.streaming and backend.problem.causal:
        state = None
        for step in range(2):
            out, state = backend.extend(*inputs[:3], state, key_mask=inputs.key_mask)
            traced = any(x.requires_grad for x in tensors_in((out, state)))
            yield Finding(f"Step {step} of extend requires a gradient {where}", float(traced), 0.0)


@Check(
    "A negative scale is equivalent to negated queries at the positive scale.",
    cases=(*KINDS, *both(ONE.but(tokens=200, batch=1), ONE.but(tokens=1, keys=5))),
    drawn=lambda seed: (*joint(seed, 9), *vary(ONE, head_dim=HEAD_SIZES)),
)
def a_negative_scale_negates_queries(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    plus = subject.build(case, scale=0.7)
    if not takes_scale(plus):
        raise cannot_check("A plain callable takes no scale.")
    inputs, minus = subject.inputs(case), subject.build(case, scale=-0.7)
    # Calibrated parameters are shared, so that both backends use the same fit.
    minus.load_state_dict(plus.state_dict())
    turned = inputs._replace(q=-inputs.q)
    bound = rounding(plus, turned, case.dtype)
    yield close("Scale −0.7", run(minus, inputs), run(plus, turned), bound)


@Check(
    "Gradients are proportional to the upstream gradient, in any layout; nothing is modified in place.",
    cases=tuple(ONE.but(batch=1, heads=1, kv_heads=1, head_dim=n, value_dim=n) for n in HEAD_SIZES),
    drawn=lambda seed: (*joint(seed, 9, 70), *joint(seed, 9, dtype="float32")),
    needs=("gradients",),
)
def layout_changes_no_gradient(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend, out, bounds = subject.plain_call(case)
    flowing = subject.inputs(case, variant=1).q.new_ones(out.shape).cumsum(-1).sin()
    bound = float(bounds.max())

    def beside_another(x: Inputs) -> Tensor:
        out = run(backend, x)
        run(backend, subject.inputs(case, variant=2)._replace(key_mask=x.key_mask).leaves())
        return out

    def flow(upstream: Tensor, out: Tensor, leaves: Sequence[Tensor]) -> list[Named]:
        computed = torch.autograd.grad(out, leaves, upstream, retain_graph=True, materialize_grads=True)
        return [(name, x) for (name, _), x in zip(expected, computed, strict=True)]

    expected, shared = gradients(partial(run, backend), inputs, upstream=flowing), inputs.leaves()
    again = partial(flow, out=run(backend, shared), leaves=shared[:3])
    for factor in FLOWING:
        scaled = [(name, x / factor) for name, x in again(flowing * factor)]
        yield from agree(f"with upstream times {factor:g}", scaled, expected, bound)
    # The gradient of a sum or a mean has strides of 0.
    for axes in ((0, 1, 2, 3), (0,), (1,), (2,), (3,)):
        x = flowing.mean(axes, keepdim=True).expand_as(flowing)
        yield from agree(f"of an upstream expanded along {axes}", again(x), again(x.contiguous()), bound)
    both_passes = gradients(beside_another, inputs, upstream=flowing)
    yield from agree("with another pass before the backward one", both_passes, expected, bound)
    turned = inputs.each(LAYOUTS["Turned"])
    for name, layout in LAYOUTS.items():
        arranged = layout(flowing)
        tensors = [x for x in (*turned, arranged) if x is not None]
        before = [x.clone() for x in tensors]
        leaves = [x.detach().requires_grad_() for x in turned[:3]]
        out = run(backend, turned.of(*leaves))
        first, second = (flow(arranged, out, leaves) for _ in range(2))
        yield from agree(f"in {name}", first, expected, bound)
        yield from agree(f"in {name} at a second pass", second, first)
        for x, old in zip(tensors, before, strict=True):
            yield same_bits(f"{name}: an input or upstream gradient after the call", x, old)
        written = float(any(x.grad is not None for x in leaves))
        yield Finding(f"{name}: the backward pass writes to .grad", written, 0.0)
