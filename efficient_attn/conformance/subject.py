"""The backend under test: its promises, its construction for each case, and comparisons of its outputs."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.backends import build, resolve
from efficient_attn.conformance.cases import CheckCase, Inputs, draw
from efficient_attn.conformance.records import Finding
from efficient_attn.errors import OptionError
from efficient_attn.external import BARE
from efficient_attn.ops.naive import softmax_attention
from efficient_attn.registry import BackendSpec, Capabilities

Named = tuple[str, Tensor]
# Small sizes, so that a few tokens exceed them; the first size that the backend accepts is used.
SMALL_SIZES = (6, 5)
# Capacity beyond the tokens of a case, so that sequences of the maximum length are not the only ones tested.
SPARE_TOKENS = 8
# Factor on the default scale, for paths that may not receive the scale, or only its size.
SCALE = -0.7
# Length and seed of the calibration inputs; no case uses this seed.
CALIBRATION_TOKENS, CALIBRATION_SEED = 32, 999_000


class PlainCall(NamedTuple):
    """A case as most checks begin: inputs, backend, output, and the bound on the rounding of each row."""

    inputs: Inputs
    backend: Backend
    out: Tensor
    bound: Tensor


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A backend and its promises.

    Attributes:
        bare: Whether the backend is a callable, whose undeclared capabilities are unknown.
        grouped: Whether grouped queries are promised or repeated for the callable.
        options: Options of an already built backend; {} takes the defaults.
    """

    spec: BackendSpec
    promises: Capabilities
    bare: bool
    grouped: bool
    options: dict[str, Any] = field(hash=False)
    seed: int
    long: bool = False
    position_dependent: bool = False

    def serves(self, case: CheckCase) -> bool:
        can = self.promises
        fits = case.k_tokens == case.tokens or (not can.needs_all_queries if case.causal else can.cross)
        masks = can.key_mask or not case.masked
        # A callable without declared capabilities is assumed to support float32 and float64.
        dtypes = [name for name in can.dtypes if "32" in name or "64" in name] if self.bare else can.dtypes
        return (can.causal or not case.causal) and masks and fits and case.dtype in dtypes

    def inputs(self, case: CheckCase, *, variant: int = 0) -> Inputs:
        """Draw the tensors of a case. `variant` selects further draws of the same shapes."""
        return draw(case, 1000 * self.seed + variant)

    def build(
        self,
        case: CheckCase,
        *,
        size: int | None = None,
        max_tokens: int | None = None,
        scale: float | None = None,
        learned: int | None = 0,
        calibrated: bool = True,
        sized: bool = True,
        **options: Any,
    ) -> Backend:
        """Build the backend for a case, in evaluation mode and in the case's dtype.

        Args:
            size: Value of the size option; None selects a small one.
            max_tokens: Maximum sequence length; None: a little more than the case needs.
            learned: Seed of a random perturbation of the parameters, so that no promise depends on their
                initial values; None keeps the initial values.
            calibrated: Whether to calibrate a backend that supports it, on inputs that no check uses and with
                scores of the same spread at every scale.
            sized: Whether to pass num_heads and max_tokens.
        """
        option = self.spec.size_option
        default = option is None or option in {**self.options, **options}
        sizes = (size,) if size is not None or default else SMALL_SIZES
        for number, candidate in enumerate(sizes):
            chosen = {**self.options, **options}
            if candidate is not None and option is not None:
                chosen[option] = candidate
            longest = max(max_tokens or case.k_tokens + SPARE_TOKENS, candidate or 0)
            try:
                backend = build(
                    self.spec,
                    head_dim=case.head_dim,
                    num_heads=case.heads if sized else None,
                    max_tokens=longest if sized or self.promises.needs_max_tokens else None,
                    causal=case.causal,
                    scale=scale,
                    **chosen,
                )
                break
            except OptionError:
                if number + 1 == len(sizes):
                    raise
        # An already built module belongs to the caller and must not be modified.
        if self.spec.options_type().__dict__ == {}:
            # Without a copy the original is checked; `a_saved_state_brings_the_output_back` reports it.
            with suppress(Exception):
                backend = copy.deepcopy(backend)
        if learned is not None:
            learn(backend, learned)
        backend = backend.eval().to(getattr(torch, case.dtype))
        return calibrate(backend, case, self.seed) if calibrated else backend

    def rescaled(self, case: CheckCase) -> Backend:
        """Build the backend with another scale than the default, if its formula has a scale."""
        backend = self.build(case)
        return self.build(case, scale=SCALE * case.head_dim**-0.5) if takes_scale(backend) else backend

    def plain_call(self, case: CheckCase, **options: Any) -> PlainCall:
        inputs, backend = self.inputs(case), self.build(case, **options)
        return PlainCall(inputs, backend, run(backend, inputs), rounding(backend, inputs, case.dtype))

    def has_option(self, name: str) -> bool:
        return any(field.name == name for field in fields(self.spec.options_type))


def subject(thing: Any, capabilities: Capabilities | None, seed: int, long: bool = False) -> Subject:
    """The subject of a check: a name, a spec, a builder, file.py:object, a module or a function."""
    options: dict[str, Any] = {}
    built = None
    if isinstance(thing, Backend):
        built = thing.options
        options = {field.name: getattr(built, field.name) for field in fields(built)}
        thing = thing.spec
    spec = resolve(thing)
    bare = capabilities is None and spec.outside
    grouped = not bare or spec.capabilities is not BARE
    if capabilities is not None:
        spec = replace(spec, capabilities=capabilities)
    promises = spec.capabilities.under(built)
    return Subject(
        spec=spec, promises=promises, bare=bare, grouped=grouped, options=options, seed=seed, long=long
    )


@torch.no_grad()
def learn(backend: Backend, seed: int) -> None:
    """Perturb every parameter with Gaussian noise, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in backend.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_(noise.to(parameter))


def calibrate(backend: Backend, case: CheckCase, seed: int) -> Backend:
    """Calibrate the backend, if it supports calibration, on Gaussian inputs with the sizes of the case."""
    if hasattr(backend.core, "calibrate"):
        typical = case.but(tokens=CALIBRATION_TOKENS, keys=None, batch=1, masked=False)
        q, k, v, _ = draw(typical, CALIBRATION_SEED + seed)
        # Scores are scale · q·k: this factor gives them the spread of the default scale.
        size = abs(case.head_dim**0.5 * backend.problem.factor) ** -0.5 if backend.problem.factor else 1.0
        backend.calibrate(q * size, k * size, v)
    return backend


def run(backend: Backend, inputs: Inputs) -> Tensor:
    q, k, v, key_mask = inputs
    return backend(q, k, v) if key_mask is None else backend(q, k, v, key_mask=key_mask)


def decode(backend: Backend, inputs: Inputs, parts: list[int]) -> tuple[Tensor, Any]:
    """Outputs of consecutive parts of a sequence and the last state, with one call of `extend` per part."""
    outputs, state, start = [], None, 0
    for tokens in parts:
        out, state = extend(backend, inputs, slice(start, start + tokens), state)
        outputs.append(out)
        start += tokens
    return torch.cat(outputs, dim=2), state


def extend(backend: Backend, inputs: Inputs, here: slice, state: Any) -> tuple[Tensor, Any]:
    q, k, v, key_mask = inputs.part(here)
    return backend.extend(q, k, v, state, key_mask=key_mask)


def results(
    subject: Subject, backend: Backend, inputs: Inputs, forward: AbstractContextManager[Any] | None = None
) -> list[Named]:
    """All results of a backend: output, gradients in gradient mode, and the output of `extend` in two parts.

    Args:
        forward: Context of the forward calls; the backward pass runs outside of it.
    """
    mode = forward or nullcontext()
    differentiable = subject.promises.gradients and torch.is_grad_enabled()
    leaves = [x.detach().requires_grad_(differentiable) for x in inputs[:3]]
    with mode:
        out = run(backend, inputs.of(*leaves))
    named = [("Output", out.detach())]
    if differentiable:
        gradients = torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)
        named += [(f"Gradient w.r.t. {name}", g) for name, g in zip("qkv", gradients, strict=True)]
    tokens = inputs.q.shape[2]
    if subject.promises.streaming and backend.problem.causal and tokens == inputs.k.shape[2]:
        with mode:
            out, _ = decode(backend, inputs, [tokens // 2, tokens - tokens // 2])
        named.append(("Output of extend", out.detach()))
    return named


def takes_scale(backend: Backend) -> bool:
    return bool(getattr(backend.core, "takes_scale", True))


# Difference that reordering the same operations may cause, relative to the largest value.
ROUNDING = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 1e-4, "float16": 1e-4}
# Change of an output that later tokens may cause; LEAK_LONG applies at 20 times Gaussian norms.
LEAK = {"float64": 1e-10, "float32": 1e-4}
LEAK_LONG = {"float64": 1e-10, "float32": 1e-3}
LONG = 20.0


def exact(inputs: Inputs, *, scale: float, causal: bool, window: int | None = None, first: int = 0) -> Tensor:
    """Softmax attention by its definition, in the dtype of the inputs, with the options of `naive`."""
    q, k, v, mask = inputs
    return softmax_attention(
        q, k, v, scale=scale, causal=causal, key_mask=mask, window=window, global_tokens=first
    )


def largest(x: Tensor) -> float:
    """Largest magnitude, 0 for an empty tensor, NaN if any entry is NaN."""
    return float(x.detach().double().abs().max()) if x.numel() else 0.0


def gradients(
    call: Callable[[Inputs], Tensor],
    inputs: Inputs,
    *,
    learned: nn.Module | None = None,
    upstream: float | Tensor | None = None,
    asking: Sequence[bool] = (True, True, True),
) -> list[Named]:
    """Gradients w.r.t. q, k, v and the parameters: of the sum of squares, or for an upstream gradient.

    Args:
        asking: Which of q, k and v require gradients.
    """
    traced = inputs.of(*(x.requires_grad_(ask) for x, ask in zip(inputs.leaves()[:3], asking, strict=True)))
    sources = dict(zip("qkv", traced[:3], strict=True)) | dict(learned.named_parameters() if learned else ())
    required = {f"Gradient w.r.t. {name}": x for name, x in sources.items() if x.requires_grad}
    with torch.enable_grad():
        out = call(traced)
    if not out.requires_grad:  # weights may depend on positions alone
        return [(name, torch.zeros_like(x)) for name, x in required.items()]
    flowing = 2 * out.detach() if upstream is None else upstream
    if not isinstance(flowing, Tensor):
        # As the gradient of a sum comes, all entries share memory.
        flowing = out.new_full((), flowing).expand_as(out)
    computed = torch.autograd.grad(out, list(required.values()), flowing, materialize_grads=True)
    return list(zip(required, computed, strict=True))


def agree(
    where: str, actual: Iterable[Named], expected: Iterable[Named], bound: float | Tensor | None = None
) -> Iterator[Finding]:
    """Compare dtypes, and bits or values. The bound on gradients is relative to their size."""
    for (name, x), (_, y) in zip(actual, expected, strict=True):
        label, size = f"{name} {where}", max(1.0, largest(y)) if name.startswith("Gradient") else 1.0
        yield Finding(f"{label} is {x.dtype}, not {y.dtype}", float(x.dtype != y.dtype), 0.0)
        yield same_bits(label, x, y) if bound is None else close(label, x, y, bound * size)


def same_bits(where: str, got: Tensor, expected: Tensor) -> Finding:
    """Bitwise equality, where NaN equals NaN."""
    equal = got.shape == expected.shape and torch.equal(got.nan_to_num(nan=7e4), expected.nan_to_num(nan=7e4))
    gap = 0.0 if equal else distance(got, expected)
    return Finding(where, gap or (0.0 if equal else float("nan")), 0.0)


def distance(got: Tensor, expected: Tensor) -> float:
    """Largest difference of two tensors, NaN if either contains NaN or the shapes differ."""
    if got.shape != expected.shape:
        return float("nan")
    return largest(got.detach().double() - expected.detach().double())


def close(where: str, got: Tensor, expected: Tensor, bound: float | Tensor) -> Finding:
    """Agreement within a bound, which may vary by row. The finding reports the worst entry."""
    if got.shape != expected.shape:
        return Finding(
            f"{where}: shape {list(got.shape)} instead of {list(expected.shape)}", float("nan"), 0.0
        )
    gap = (got.detach().double() - expected.detach().double()).abs()
    limit = torch.as_tensor(bound, dtype=torch.float64).expand_as(gap)
    if gap.numel() == 0:
        return Finding(where, 0.0, float(limit.max()) if limit.numel() else 0.0)
    # NaN counts as the largest error.
    worst = (gap / limit.clamp_min(torch.finfo(torch.float64).tiny)).nan_to_num(nan=torch.inf).argmax()
    return Finding(where, float(gap.flatten()[worst]), float(limit.flatten()[worst]))


def condition(backend: Backend, inputs: Inputs) -> Tensor:
    """Condition number Σ_j |weight_ij| of every row, at least 1, [batch heads q_tokens 1]."""
    if backend.spec.capabilities.nonnegative:
        return torch.ones(*inputs.q.shape[:-1], 1, dtype=torch.float64)
    weights = backend.attention_weights(inputs.q, inputs.k, key_mask=inputs.key_mask)
    return weights.detach().double().abs().sum(dim=-1, keepdim=True).nan_to_num(nan=1.0).clamp_min(1.0)


def rounding(backend: Backend, inputs: Inputs, dtype: str) -> Tensor:
    """Bound on the rounding error of each row of the output, [batch heads q_tokens 1]."""
    steps = 2 * rounding_step(inputs.v) if dtype in ("bfloat16", "float16") else 0.0
    return magnified(ROUNDING[dtype], backend, inputs) + steps * condition(backend, inputs)


def magnified(share: float, backend: Backend, inputs: Inputs) -> Tensor:
    """Effect on each output row of a relative error `share` in the weights, [batch heads q_tokens 1].

    With κ = Σ_j |weight_ij| the numerator is off by share · κ · |v| and the denominator by share · κ:
    together κ · share · (|v| + |output_i|). The bound uses the larger of the two norms.
    """
    out = run(backend, inputs).detach().double().abs()
    size = out.amax(dim=-1, keepdim=True) if out.shape[-1] else out.new_zeros(*out.shape[:-1], 1)
    size = size.nan_to_num(nan=0.0, posinf=0.0).clamp_min(max(1.0, largest(inputs.v)))
    return share * condition(backend, inputs) * size


def rounding_step(x: Tensor) -> float:
    """Spacing of the dtype's numbers at the largest entry of x. One rounding loses half of it."""
    return torch.finfo(x.dtype).eps * largest(x)
