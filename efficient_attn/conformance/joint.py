"""Randomised combinations of sizes, masks, causality and cross-attention: relations that always hold."""

import itertools
from collections.abc import Iterator
from operator import itemgetter

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.conformance.cases import LARGE, MANY_PAIRS, Case, Inputs, both, joint, spread
from efficient_attn.conformance.compare import close, distance, rounding
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import Subject, run
from efficient_attn.conformance.table import Check

# Short vectors keep signed features from cancelling, which would spoil finite differences.
GENTLE = 0.5
STEP = 1e-5
DIRECTIONS = 3
BORDER = Case(tokens=129, batch=1, heads=2, kv_heads=1, value_dim=3, norm=GENTLE)
# Lengths at and beyond usual block sizes, with every setting that affects gradients.
BEYOND = tuple(
    BORDER.but(tokens=tokens, causal=causal, masked=masked)
    for tokens, masked in ((129, True), (256, False), (513, True))
    for causal in (False, True)
)


# The long form has an input that every backend serves, and one with everything at once.
LONG = Case(tokens=2100, batch=2, heads=2, kv_heads=2)


# A batch, heads, groups and widths beyond the vectors, warps and tiles of kernels.
LARGE_BATCH = Case(tokens=3, batch=260, heads=8, kv_heads=2, masked=True, pattern=7)
GROUPS = Case(tokens=3, batch=2, heads=36, kv_heads=3, norm=GENTLE)
WIDE = Case(tokens=3, batch=1, head_dim=160, value_dim=136, norm=GENTLE)


def _long(seed: int) -> tuple[Case, ...]:
    return (LONG, *joint(seed, 2100)[:2])


@Check(
    "A sequence of a batch has the same output as in a call of its own.",
    drawn=lambda seed: (
        *joint(seed, 3, 9, 70, 200),
        *joint(seed, 9, 70, dtype="float32"),
        *both(LARGE_BATCH),
        MANY_PAIRS.but(dtype="float32"),
    ),
    long=_long,
)
def every_sequence_is_its_single_call(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    out, bound = run(backend, inputs), rounding(backend, inputs, case.dtype)
    for b in spread(case.batch):
        alone = inputs.each(itemgetter(slice(b, b + 1)))
        yield close(f"Sequence {b} alone", run(backend, alone), out[b : b + 1], bound[b : b + 1])


@Check(
    "A head has the same output as in a call of its own, with the keys and values of its group.",
    drawn=lambda seed: (
        *joint(seed, 3, 9, 70),
        *joint(seed, 9, dtype="float32"),
        *both(GROUPS),
        GROUPS.but(heads=64, kv_heads=64),
        *LARGE,
    ),
    long=_long,
)
def every_head_is_its_single_call(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    out, bound = run(backend, inputs), rounding(backend, inputs, case.dtype)
    single = _single_head(subject, case, backend)
    for head in spread(case.heads):
        group = head // (case.heads // case.kv_heads)
        alone = inputs.of(*(x[:, i : i + 1] for x, i in zip(inputs[:3], (head, group, group), strict=True)))
        if single is None:
            # Heads have their own parameters: the head keeps its position among copies of itself.
            alone = alone.of(*(x.repeat(1, case.heads, 1, 1) for x in alone[:3]))
        got = run(single or backend, alone)[:, head if single is None else 0]
        yield close(f"Head {head} alone", got, out[:, head], bound[:, head])


@Check(
    "A column of the values has the same output as in a call of its own, for any key and value dimensions.",
    drawn=lambda seed: (*joint(seed, 3, 9), *joint(seed, 9, dtype="float32"), WIDE, *LARGE),
)
def columns_of_values_are_computed_alone(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    out, bound = run(backend, inputs), rounding(backend, inputs, case.dtype)
    for column in spread(case.value_dim):
        alone = run(backend, inputs._replace(v=inputs.v[..., column : column + 1]))
        yield close(f"Column {column} of v alone", alone, out[..., column : column + 1], bound)


def _single_head(subject: Subject, case: Case, backend: Backend) -> Backend | None:
    """The same backend for one head; None if it has parameters per head."""
    single, state = subject.build(case.but(heads=1, kv_heads=1)), backend.state_dict()
    if any(x.shape != single.state_dict()[name].shape for name, x in state.items()):
        return None
    single.load_state_dict(state)
    return single


@Check(
    "Gradients w.r.t. q, k, v and parameters match finite differences, for all settings and lengths.",
    cases=BEYOND,
    drawn=lambda seed: (
        *(case.but(norm=GENTLE) for case in joint(seed, 2, 6, 33)),
        *both(GROUPS),
        *both(WIDE),
        LARGE_BATCH.but(batch=40, norm=GENTLE),
        *LARGE,
    ),
    long=lambda seed: (BORDER.but(tokens=2100, masked=True), BORDER.but(tokens=2100, causal=True)),
    needs=("gradients",),
)
def gradients_hold_at_every_shape(subject: Subject, case: Case) -> Iterator[Finding]:
    if case.dtype not in subject.promises.dtypes:
        return
    backend, finding = subject.rescaled(case) if case.masked else subject.build(case), None
    backend.train()
    for direction in range(DIRECTIONS):
        # A kink spoils the difference quotient of one direction; a wrong gradient is wrong along all of them.
        finding = along(subject, backend, case, direction)
        if finding.holds:
            break
    assert finding is not None
    yield finding


def along(
    subject: Subject, backend: Backend, case: Case, direction: int, inputs: Inputs | None = None
) -> Finding:
    """Compare a directional derivative of a weighted sum of outputs with difference quotients."""
    inputs = subject.inputs(case, variant=2 * direction) if inputs is None else inputs
    dq, dk, dv, _ = subject.inputs(case, variant=2 * direction + 1)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    learned = list(backend.parameters())
    generator = torch.Generator().manual_seed(direction)
    moves = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in learned]
    out = run(backend, inputs)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    gradients = torch.autograd.grad((out * weights).sum(), [*leaves, *learned], allow_unused=True)
    pairs = zip(gradients, (dq, dk, dv, *moves), strict=True)
    slope = float(sum((g * d).sum() for g, d in pairs if g is not None))

    @torch.no_grad()
    def quotient(step: float) -> float:
        sums = []
        for change in (step, -step):
            _shift(learned, moves, change)
            at = inputs.of(*(x + change * d for x, d in zip(leaves, (dq, dk, dv), strict=True)))
            sums.append(float((run(backend, at) * weights).sum()))
            _shift(learned, moves, -change)
        return (sums[0] - sums[1]) / (2 * step)

    near, far = quotient(STEP), quotient(2 * STEP)
    # The two quotients differ by three times the error of the smaller step; rounding is divided by the step.
    noise = float((rounding(backend, inputs, case.dtype) * weights.abs()).sum()) / STEP
    return Finding("Along a random direction", abs(slope - near), abs(far - near) + noise)


@torch.no_grad()
def _shift(parameters: list[torch.nn.Parameter], moves: list[Tensor], factor: float) -> None:
    for parameter, move in zip(parameters, moves, strict=True):
        parameter.add_(move, alpha=factor)


@Check(
    "Gradients do not depend on which of q, k, v and the parameters require them.",
    cases=(*BEYOND, *(case.but(dtype="float32") for case in BEYOND)),
    drawn=lambda seed: (*joint(seed, 6), *joint(seed, 6, dtype="float32")),
    needs=("gradients",),
)
def frozen_inputs(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    expected = _gradients(backend, inputs, (True,) * 4)
    bound = float(rounding(backend, inputs, case.dtype).max())
    sizes = [max(1.0, float(x.abs().max())) if x is not None and x.numel() else 1.0 for x in expected]
    names = [*"qkv", *(name for name, _ in backend.named_parameters())]
    # The parameters, all together, are a fourth input that may be frozen.
    with_parameters = (False, True) if any(True for _ in backend.parameters()) else (False,)
    for asking in itertools.product((False, True), (False, True), (False, True), with_parameters):
        got = _gradients(backend, inputs, asking) if any(asking) else []
        for name, x, y, size in zip(names, got, expected, sizes, strict=False):
            if x is not None and y is not None:
                where = "".join(letter for letter, is_asked in zip("qkv", asking, strict=False) if is_asked)
                label = f"Gradient w.r.t. {name}, {where or 'none'}{' and parameters' * asking[3]} required"
                yield Finding(label, distance(x, y), bound * size)


def _gradients(backend: Backend, inputs: Inputs, asking: tuple[bool, ...]) -> list[Tensor | None]:
    """Gradients of the sum of squares w.r.t. q, k, v and the parameters; None where not required."""
    leaves = [x.detach().clone().requires_grad_(ask) for x, ask in zip(inputs[:3], asking, strict=False)]
    parameters = [x.requires_grad_(asking[3]) for x in backend.parameters()]
    total = run(backend, inputs.of(*leaves)).square().sum()
    tensors = [*leaves, *parameters]
    required = [x for x in tensors if x.requires_grad]
    computed = iter(torch.autograd.grad(total, required, allow_unused=True))
    gradients = [next(computed) if x.requires_grad else None for x in tensors]
    for parameter in parameters:
        parameter.requires_grad_(True)
    return gradients
