"""Faults of attentions, each a function of tensors at one step of a backend without fault.

A function is called with what its arguments name: the backend as `core`, the tensors of the step, or, by any
other name, the tensor that it changes.
"""

import math
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from twins import with_gradient

from efficient_attn.distributed.keys import attend_keys

STEPS = {
    "forward": ("q", "k", "v", "mask"),
    "extend": ("q", "k", "v", "state", "mask"),
    "for_every_head": ("x", "heads"),
    "hidden": ("x", "mask"),
    "visible": ("q", "k", "mask"),
    "scores": ("q", "k"),
    "weights": ("logits", "visible"),
}


def replaced(step: str, change: Callable[..., Any]) -> type:
    """A mixin with another step: `change` takes the backend, the step without fault, and its tensors."""

    def method(core, *tensors):
        return change(core, lambda *x: getattr(super(mixin, core), step)(*x), *tensors)

    mixin = type("Fault", (), {step: method})
    return mixin


def _called(function: Callable[..., Any], x: Any, named: dict[str, Any]) -> Any:
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code else ("x",)
    return function(*(named.get(name, x) for name in names))


def before(step: str, name: str) -> Callable[..., type]:
    """Faults that change one tensor of a step, wherever a condition holds."""

    def form(change: Callable[..., Any], *, where: Callable[..., Any] = lambda: True) -> type:
        def method(core, step_without_fault, *tensors):
            named = dict(zip(STEPS[step], tensors, strict=True))
            x, there = named[name], {**named, "core": core}
            if x is not None and _called(where, x, there):
                named[name] = _called(change, x, there)
            return step_without_fault(*named.values())

        return replaced(step, method)

    return form


def after(step: str) -> Callable[..., type]:
    """Faults that change the result of a step."""

    def form(change: Callable[..., Any]) -> type:
        def method(core, step_without_fault, *tensors):
            named = dict(zip(STEPS[step], tensors, strict=True))
            return _called(change, step_without_fault(*tensors), {**named, "core": core})

        return replaced(step, method)

    return form


queries, keys, values, masks = (before("forward", name) for name in STEPS["forward"])
new_queries, new_keys, new_values, earlier_states, new_masks = (
    before("extend", name) for name in STEPS["extend"]
)
output, scores, weights, visible = (after(step) for step in ("forward", "scores", "weights", "visible"))


def flowing(change: Callable[[Tensor], Tensor]) -> type:
    """Another gradient of the output."""
    return output(lambda x: with_gradient(x, change))


def scaled(factor: Callable[..., Any]) -> type:
    """Queries times a factor."""
    return before("scores", "q")(lambda q, k, core: q * _called(factor, None, {"q": q, "k": k, "core": core}))


def action(act: Callable[..., Any]) -> type:
    """A side effect before each call."""

    def change(q, k, v, mask, core):
        _called(act, None, {"q": q, "k": k, "v": v, "mask": mask, "core": core})
        return q

    return queries(change)


def unmasked(where: Callable[..., Any]) -> type:
    """Key masks without effect on the weights, where a condition holds."""
    return before("visible", "mask")(lambda x: None, where=where)


def groups_in_turn(where: Callable[..., Any]) -> type:
    """Grouped queries meet the heads of another group, where a condition holds for x and heads."""

    def for_every_head(core, for_every_head, x, heads):
        if _called(where, x, {"x": x, "heads": heads}):
            return x.repeat(1, heads // x.shape[1], 1, 1)
        return for_every_head(x, heads)

    return replaced("for_every_head", for_every_head)


def first_keys(number: Callable[..., int]) -> type:
    """No more keys are read than a number, of the queries and of how many keys there are."""
    return visible(
        lambda x, q, k: x & (torch.arange(k.shape[2]) < _called(number, None, {"q": q, "keys": k.shape[2]}))
    )


def causal_reads(reads: Callable[[Tensor, Tensor, int], Tensor]) -> type:
    """Where causal, fewer keys are read, by row, key, and keys before the first row."""

    def change(x, q, k, core):
        rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        return x & reads(rows, columns, k.shape[2] - q.shape[2]) if core.problem.causal else x

    return visible(change)


def causal_leak(first: int, step: int) -> type:
    """Some rows of long causal sequences read the next key."""

    def change(x, q, k, core):
        if core.problem.causal and q.shape[2] == k.shape[2] > first:
            rows = torch.arange(first, q.shape[2] - 1, step)
            x = x.clone()
            x[..., rows, rows + 1] = True
        return x

    return visible(change)


def states(change: Callable[..., tuple[Tensor, ...]]) -> type:
    """Another state after `extend`, of its keys, values and mask."""

    def extend(core, extend, *tensors):
        out, state = extend(*tensors)
        return out, change(*state)

    return replaced("extend", extend)


def ring(most: int) -> type:
    return states(lambda k, v, mask: (k[:, :, -most:], v[:, :, -most:], mask[:, -most:]))


def remembered(step: str, name: str, key: Callable[[Tensor], Any]) -> type:
    """A tensor is copied once for each key, and the copy is read ever after."""

    def change(x, core):
        copies = core.__dict__.setdefault("copies", {})
        copied = copies.setdefault(key(x), (x, x.detach().clone()))[1]
        return x + (copied - x.detach()) if x.is_floating_point() else copied

    return before(step, name)(change)


# Changes -----------------------------------------------------------------------------------------------


def halved(x: Tensor) -> Tensor:
    """x with half its gradient."""
    return with_gradient(x, lambda gradient: gradient * 0.5)


def narrowed(of: torch.dtype, to: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Tensors of a dtype are rounded to another."""
    return lambda x: x.to(to).to(x) if x.dtype == of else x


def long_keys(k: Tensor) -> bool:
    return bool(k.detach().norm(dim=-1).max() > 10)


def remember(core: nn.Module, x: Any) -> Any:
    """x, of which the backend keeps the last."""
    core.__dict__["last"] = x
    return x


def collect(core: nn.Module, x: Any) -> Any:
    """x, of which the backend keeps all."""
    core.__dict__.setdefault("results", []).append(x)
    return x


def buffered(core: nn.Module, x: Tensor) -> Tensor:
    """x in a buffer, which the next tensor of its shape overwrites."""
    buffers = core.__dict__.setdefault("buffers", {})
    return buffers.setdefault((x.shape, x.dtype), torch.empty_like(x)).copy_(x)


def calls(core: nn.Module) -> int:
    """The number of calls so far."""
    core.__dict__["calls"] = core.__dict__.get("calls", 0) + 1
    return core.__dict__["calls"]


def default_ratio(core: nn.Module) -> float:
    """The default scale over the scale; 1 at the default."""
    return core.problem.head_dim**-0.5 / core.problem.scale if core.problem.scale else 1.0


def read_later(x: Tensor, now: Tensor | None = None) -> Tensor:
    """x, whose gradient is off by what happens to it, or to `now`, until the backward pass."""
    source, copied = x if now is None else now, x.detach().clone()
    return with_gradient(x, lambda gradient: gradient * (1 + (source.detach() - copied)))


def another_gradient_each_time(x: Tensor) -> Tensor:
    passes = count(1)
    return with_gradient(x, lambda gradient: gradient * next(passes))


def doubled_in_place(gradient: Tensor) -> Tensor:
    copied = gradient.clone()
    if 0 not in gradient.stride():
        gradient.mul_(2.0)
    return copied


def read_as_contiguous(gradient: Tensor) -> Tensor:
    if 0 in gradient.stride() or gradient.is_contiguous():
        return gradient
    return gradient.as_strided(gradient.shape, gradient.contiguous().stride())


def clamped_denominator(logits, visible):
    """A denominator kept above one shrinks every row whose sum is less."""
    w = torch.where(visible, logits.exp(), 0.0)
    return w / w.sum(dim=-1, keepdim=True).clamp_min(1.0)


def float16_denominator(logits, visible):
    w = torch.where(visible, logits.exp(), 0.0)
    total = (w.half() if w.dtype == torch.float32 else w).sum(dim=-1, keepdim=True).to(w)
    return w / torch.where(total > 0, total, 1.0)


def powers_of_the_first_block(x, logits, visible):
    """Powers of later blocks are relative to the largest of the first, and overflow."""
    if x.shape[-1] <= 128:
        return x
    first = logits.detach()[..., :128].amax(dim=-1, keepdim=True)
    w = (logits - first).exp().masked_fill(~visible, 0.0)
    return w / w.sum(dim=-1, keepdim=True).clamp_min(1e-300)


def equal_keys_once(x, k):
    equal = (k[:, :, :, None] == k[:, :, None]).all(dim=-1).tril(-1).any(dim=-1)
    return x & ~equal[:, :, None]


def halves_without_their_sums(x, k, mask):
    """A half whose keys are all masked counts as much as the other."""
    if mask is None or k.shape[2] <= 1024:
        return x
    blind = ~mask[:, : k.shape[2] // 2].any(dim=1) & mask.any(dim=1)
    return torch.where(blind[:, None, None, None], x / 2, x)


def default_dtype_of_a_failure(core, forward, *tensors):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    out = forward(*tensors)
    torch.set_default_dtype(before)
    return out


def busy_after_an_error(core, forward, *tensors):
    """A flag that only a call without an error takes back."""
    busy = core.__dict__.get("last", False)
    remember(core, True)
    out = forward(*tensors) * (1.01 if busy else 1.0)
    remember(core, False)
    return out


def running_mean(core):
    """A statistic, which training updates and evaluation reads."""
    core.__dict__["mean"] = core.__dict__.get("mean", 0.0) + 0.01 * core.training
    return 1.0 if core.training else 1 + core.__dict__["mean"]


def with_graphs(core, step, *tensors):
    with torch.enable_grad():
        return step(*tensors)


def quadratic_time(x, k):
    for row in range(0, k.shape[2], 16):
        x = x + 0 * (k[:, :, row : row + 16] @ k.mT).sum(-1, keepdim=True).sum(2, keepdim=True)
    return x


def mask_of_all_pairs(where: Callable[[Tensor], bool]) -> type:
    """Quadratic memory, where the queries are such."""
    return output(
        lambda x, q, k: x * torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)[:, :1] if where(q) else x
    )


# Streams -----------------------------------------------------------------------------------------------


def callers_buffers(core, extend, q, k, v, state, mask):
    out, result = extend(q, k, v, state, mask)
    return out, (k, v, result[2]) if state is None else result


def one_buffer_for_single_tokens(core, extend, *tensors):
    out, state = extend(*tensors)
    return (out if out.requires_grad or out.shape[2] != 1 else buffered(core, out)), state


def masks_after_an_unmasked_part(core, extend, q, k, v, state, mask):
    """A stream whose first part has no mask never has one; a fourth tensor of the state says so."""
    unmasked = mask is None if state is None else len(state) == 4
    out, result = extend(q, k, v, state and state[:3], None if unmasked else mask)
    return out, (*result, torch.ones(())) if unmasked else result


def written(state):
    state[1][:, :, -1:].mul_(1.5)
    return state


def predecessors(core, extend, q, k, v, state, mask):
    out, result = extend(q, k, v, state, mask)
    return out, (*result, state)


# Compiled calls, whose graphs have no functions by name, and calls of several threads ----------------------


class BranchesOnTheMask:
    def forward(self, q, k, v, key_mask):
        if key_mask is not None and key_mask.all():
            key_mask = None
        return super().forward(q, k, v, key_mask)


class CompilesTheUpperLeftTriangle:
    def visible(self, q, k, key_mask):
        visible = super().visible(q, k, key_mask)
        if self.problem.causal and torch.compiler.is_compiling():
            visible = visible & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return visible


class NoGuardForBlindRowsWhenCompiled:
    def forward(self, q, k, v, key_mask):
        out = super().forward(q, k, v, key_mask)
        if torch.compiler.is_compiling() and key_mask is not None:
            return out / key_mask.any(dim=1)[:, None, None, None]
        return out


class KeepsItsMaskBetweenThreads:
    def forward(self, q, k, v, key_mask):
        self.__dict__["mask"] = key_mask
        return super().forward(q, k, v, key_mask)

    def visible(self, q, k, key_mask):
        return super().visible(q, k, self.__dict__["mask"])


# Random features ---------------------------------------------------------------------------------------


def draw_without_signs(core, draw, seed):
    """The Q of a QR decomposition as it comes has a preferred sign."""
    dim, generator = core.problem.head_dim, torch.Generator().manual_seed(seed)
    blocks = -(-core.options.num_features // dim)
    gaussian = torch.randn(2, blocks, dim, dim, generator=generator, dtype=torch.float64)
    rotations, lengths = torch.linalg.qr(gaussian[0])[0], gaussian[1].norm(dim=-1, keepdim=True)
    return (rotations * lengths).flatten(0, 1)[: core.options.num_features]


def largest_future_key(core, q, k):
    """The keys' maximum runs over later positions, and an additive epsilon makes it matter."""
    query, key = core.logarithms(q), core.logarithms(k)
    features = (key - key.amax(dim=(-1, -2), keepdim=True)).exp() + 1e-4
    return (((query - query.amax(dim=-1, keepdim=True)).exp() + 1e-4) @ features.mT).log()


def seed_of_the_batch(core, q):
    """The seed is a sum over the queries: what else is in the batch changes a sequence's output."""
    core.redraw(math.ceil(abs(float(q.detach().double().nan_to_num().sum())) * 1e7) % 2**31)


# Exchanges between ranks -------------------------------------------------------------------------------


def ranks_in_their_order(backend, q, k, v, mask, layout):
    """Right for contiguous segments, wrong for a head-tail layout."""
    return attend_keys(backend, q, k, v, mask, layout._replace(kind="contiguous"))


def gradients_times_the_ranks(backend, q, k, v, mask, layout):
    """The output is right; every rank sums the gradients of all, and the sums are summed again."""
    k, v = (x + (layout.ranks - 1) * (x - x.detach()) for x in (k, v))
    return attend_keys(backend, q, k, v, mask, layout)
