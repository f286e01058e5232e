"""Faults of attentions, each a function of the tensors of one step of a backend without fault."""

import math
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from twins import with_gradient

from efficient_attn.distributed.keys import attend_keys

# A step without its fault ------------------------------------------------------------------------------


def replaced(step: str, change: Callable[..., Any]) -> type:
    """A mixin with another step: `change` takes the backend, the step without fault, and its tensors."""

    def method(core, *tensors):
        return change(core, lambda *x: getattr(super(mixin, core), step)(*x), *tensors)

    mixin = type("Fault", (), {step: method})
    return mixin


def inputs(change: Callable[..., tuple[Any, ...]]) -> type:
    """Other queries, keys, values and mask."""
    return replaced("forward", lambda core, forward, *tensors: forward(*change(core, *tensors)))


def _at(step: str, position: int) -> Callable[..., type]:
    """The form of faults of one input of a step, where the backend and all inputs are such."""

    def form(change: Callable[[Any], Any], *, where: Callable[..., Any] = lambda *_: True) -> type:
        def method(core, step, *tensors):
            x = tensors[position]
            changes = x is not None and where(core, *tensors)
            return step(*tensors[:position], change(x) if changes else x, *tensors[position + 1 :])

        return replaced(step, method)

    return form


queries, keys, values, masks = (_at("forward", position) for position in range(4))
new_queries, new_keys, new_values, earlier_states, new_masks = (_at("extend", n) for n in range(5))


def output(change: Callable[[Tensor], Tensor]) -> type:
    return replaced("forward", lambda core, forward, *tensors: change(forward(*tensors)))


def flowing(change: Callable[[Tensor], Tensor]) -> type:
    """Another gradient of the output."""
    return output(lambda x: with_gradient(x, change))


def scores(change: Callable[[Tensor], Tensor]) -> type:
    return replaced("scores", lambda core, scores, q, k: change(scores(q, k)))


def weights(change: Callable[[Tensor], Tensor]) -> type:
    return replaced("weights", lambda core, weights, *tensors: change(weights(*tensors)))


def scaled(factor: Callable[..., Any]) -> type:
    """Queries times a factor, of the backend, queries and keys."""
    return replaced("scores", lambda core, scores, q, k: scores(q * factor(core, q, k), k))


def action(act: Callable[..., Any]) -> type:
    """A side effect before each call, of the backend and its inputs."""

    def forward(core, forward, *tensors):
        act(core, *tensors)
        return forward(*tensors)

    return replaced("forward", forward)


def unmasked(where: Callable[..., bool]) -> type:
    """Key masks without effect on the weights, where the backend, queries and keys are such."""
    return replaced(
        "visible", lambda core, visible, q, k, mask: visible(q, k, None if where(core, q, k) else mask)
    )


def first_keys(number: Callable[[Tensor, int], int]) -> type:
    """No more keys are read than a number, of the queries and of how many keys there are."""

    def visible(core, visible, q, k, mask):
        return visible(q, k, mask) & (torch.arange(k.shape[2]) < number(q, k.shape[2]))

    return replaced("visible", visible)


def causal_reads(reads: Callable[[Tensor, Tensor, int], Tensor]) -> type:
    """Where causal, fewer keys are read, by row, key, and keys before the first row."""

    def visible(core, visible, q, k, mask):
        rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        allowed = visible(q, k, mask)
        return allowed & reads(rows, columns, k.shape[2] - q.shape[2]) if core.problem.causal else allowed

    return replaced("visible", visible)


def causal_leak(first: int, step: int) -> type:
    """Some rows of long causal sequences read the next key."""

    def visible(core, visible, q, k, mask):
        allowed = visible(q, k, mask).clone()
        if core.problem.causal and q.shape[2] == k.shape[2]:
            rows = torch.arange(min(first, q.shape[2] - 1), q.shape[2] - 1, step)
            allowed[..., rows, rows + 1] = True
        return allowed

    return replaced("visible", visible)


def groups_in_turn(where: Callable[[Tensor, int], bool]) -> type:
    """Grouped queries meet the heads of another group, where the keys and the number of heads are such."""

    def for_every_head(core, for_every_head, x, heads):
        return x.repeat(1, heads // x.shape[1], 1, 1) if where(x, heads) else for_every_head(x, heads)

    return replaced("for_every_head", for_every_head)


def group_gradient(where: Callable[[Tensor, int], bool]) -> type:
    """Half the gradient of keys and values, where they and the number of heads are such."""

    def for_every_head(core, for_every_head, x, heads):
        return for_every_head(halved(x) if where(x, heads) else x, heads)

    return replaced("for_every_head", for_every_head)


def first_entries(number: Callable[[int], int]) -> type:
    """No more entries of queries and keys are read than a number, of the head dimension."""

    def cut(core, q, k, v, mask):
        size = number(q.shape[3])
        return q[..., :size], k[..., :size], v, mask

    return inputs(cut)


def states(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> type:
    """Another state after `extend`, of its keys, values and mask."""

    def extend(core, extend, *tensors):
        out, state = extend(*tensors)
        return out, change(*state)

    return replaced("extend", extend)


def ring(most: int) -> type:
    return states(lambda k, v, mask: (k[:, :, -most:], v[:, :, -most:], mask[:, -most:]))


def remembered_inputs(step: str, position: int, key: Callable[[Tensor], Any]) -> type:
    """One of the inputs is copied once for each key, and the copy is read ever after."""

    def method(core, step, *tensors):
        x = tensors[position]
        copied = x if x is None else remembered(core, key(x), x)
        return step(*tensors[:position], copied, *tensors[position + 1 :])

    return replaced(step, method)


def remembered(core: nn.Module, key: Any, x: Tensor) -> Tensor:
    """The contents of x at the first call with this key; the gradient is that of x."""
    copies = core.__dict__.setdefault("copies", {})
    copied = copies.setdefault(key, (x, x.detach().clone()))[1]
    return x + (copied - x.detach()) if x.is_floating_point() else copied


def remember(core: nn.Module, x: Any) -> Any:
    """x, of which the backend keeps the last."""
    core.__dict__["last"] = x
    return x


def collected(step: str) -> type:
    """All results of a step are kept."""

    def change(core, step, *tensors):
        core.__dict__.setdefault("results", []).append(step(*tensors))
        return core.__dict__["results"][-1]

    return replaced(step, change)


# Changes of a tensor -----------------------------------------------------------------------------------


def halved(x: Tensor) -> Tensor:
    """x with half its gradient."""
    return with_gradient(x, lambda gradient: gradient * 0.5)


def narrowed(of: torch.dtype, to: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Tensors of a dtype are rounded to another."""
    return lambda x: x.to(to).to(x) if x.dtype == of else x


def long_keys(core: nn.Module, q: Tensor, k: Tensor, *_: Any) -> bool:
    return bool(k.detach().norm(dim=-1).max() > 10)


def calls(core: nn.Module) -> int:
    """The number of calls so far."""
    core.__dict__["calls"] = core.__dict__.get("calls", 0) + 1
    return core.__dict__["calls"]


def default_ratio(core: nn.Module) -> float:
    """The default scale over the scale; 1 at the default."""
    return core.problem.head_dim**-0.5 / core.problem.scale if core.problem.scale else 1.0


def read_later(now: Tensor, x: Tensor) -> Tensor:
    """x, whose gradient is off by what happens to `now` until the backward pass."""
    before = x.detach().clone()
    return with_gradient(x, lambda gradient: gradient * (1 + (now.detach() - before)))


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


# Steps with a fault of several lines -------------------------------------------------------------------


def uniform_blind_rows(core, weights, x, visible):
    """A large negative number in place of minus infinity: a blind row becomes uniform."""
    if core.problem.head_dim < 64:
        return weights(x, visible)
    return x.masked_fill(~visible, torch.finfo(x.dtype).min).softmax(dim=-1)


def clamped_denominator(core, weights, x, visible):
    """A denominator kept above one shrinks every row whose sum is less."""
    w = torch.where(visible, x.exp(), 0.0)
    return w / w.sum(dim=-1, keepdim=True).clamp_min(1.0)


def float16_denominator(core, weights, x, visible):
    w = torch.where(visible, x.exp(), 0.0)
    total = (w.half() if w.dtype == torch.float32 else w).sum(dim=-1, keepdim=True).to(w)
    return w / torch.where(total > 0, total, 1.0)


def powers_of_the_first_block(core, weights, x, visible):
    """Powers of later blocks are relative to the largest of the first, and overflow."""
    if x.shape[-1] <= 128:
        return weights(x, visible)
    first = x.detach()[..., :128].amax(dim=-1, keepdim=True)
    w = (x - first).exp().masked_fill(~visible, 0.0)
    return w / w.sum(dim=-1, keepdim=True).clamp_min(1e-300)


def equal_keys_once(core, visible, q, k, mask):
    equal = (k[:, :, :, None] == k[:, :, None]).all(dim=-1).tril(-1).any(dim=-1)
    return visible(q, k, mask) & ~equal[:, :, None]


def masks_of_all_lengths(core, visible, q, k, mask):
    if mask is not None:
        return visible(q, k, mask)
    return core.__dict__.setdefault("all", {}).setdefault((q.shape[2], k.shape[2]), visible(q, k, None))


def halves_without_their_sums(core, forward, q, k, v, mask):
    """A half whose keys are all masked counts as much as the other."""
    out = forward(q, k, v, mask)
    if mask is None or k.shape[2] <= 1024:
        return out
    blind = ~mask[:, : k.shape[2] // 2].any(dim=1) & mask.any(dim=1)
    return torch.where(blind[:, None, None, None], out / 2, out)


def padding_without_a_mask(core, q, k, v, mask):
    """Zeros are appended up to a multiple of a block, and their scores of zero join the softmax."""
    missing = -k.shape[2] % 4
    k, v = (nn.functional.pad(x, (0, 0, 0, missing)) for x in (k, v))
    return q, k, v, None if mask is None else nn.functional.pad(mask, (0, missing), value=False)


def mixed_tokens(core, q, k, v, mask):
    """A causal Linformer: the mask is laid over mixtures that know the future already."""
    mix = torch.full((k.shape[2], k.shape[2]), 1 / k.shape[2], dtype=k.dtype)
    return q, mix @ k, mix @ v, mask


def nan_for_padding(core, q, k, v, mask):
    real = ~k.isnan().any(-1).any(1)
    return q, k.nan_to_num(), v, real if mask is None else mask & real


def workspace_of_the_next_call(core, q, k, v, mask):
    """The backward pass reads a buffer that the next forward pass fills."""
    buffers = core.__dict__.setdefault("buffers", {})
    buffer = buffers.setdefault((q.shape, q.dtype), torch.empty_like(q))
    return read_later(buffer.copy_(q.detach()), q), k, v, mask


def one_buffer_in_inference_mode(core, forward, *tensors):
    out = forward(*tensors)
    if not torch.is_inference_mode_enabled():
        return out
    buffers = core.__dict__.setdefault("buffers", {})
    return buffers.setdefault((out.shape, out.dtype), torch.empty_like(out)).copy_(out)


def upstream_gradient_kept(core, forward, *tensors):
    return with_gradient(forward(*tensors), lambda gradient: remember(core, gradient))


def with_graphs(core, step, *tensors):
    with torch.enable_grad():
        return step(*tensors)


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


def running_mean(core, q, k):
    """A statistic, which training updates and evaluation reads."""
    core.__dict__["mean"] = core.__dict__.get("mean", 0.0) + 0.01 * core.training
    return 1.0 if core.training else 1 + core.__dict__["mean"]


def quadratic_time(core, forward, q, k, v, mask):
    out = forward(q, k, v, mask)
    for row in range(0, k.shape[2], 16):
        out = out + 0 * (k[:, :, row : row + 16] @ k.mT).sum(-1, keepdim=True).sum(2, keepdim=True)
    return out


def mask_of_all_pairs(where: Callable[[Tensor], bool]) -> type:
    """Quadratic memory, where the queries are such."""

    def forward(core, forward, q, k, v, mask):
        out = forward(q, k, v, mask)
        return out * torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)[:, :1] if where(q) else out

    return replaced("forward", forward)


# Streams -----------------------------------------------------------------------------------------------


def callers_buffers(core, extend, q, k, v, state, mask):
    out, result = extend(q, k, v, state, mask)
    return out, (k, v, result[2]) if state is None else result


def later_rows(core, extend, q, k, v, state, mask):
    """A row reads the rows behind it."""
    out, result = extend(q, k, v, state, mask)
    return (out.flip(2).cummax(2).values.flip(2) if q.shape[2] > 1 and state is not None else out), result


def one_buffer_for_single_tokens(core, extend, *tensors):
    out, state = extend(*tensors)
    if out.requires_grad or out.shape[2] != 1:
        return out, state
    buffers = core.__dict__.setdefault("buffers", {})
    return buffers.setdefault((out.shape, out.dtype), torch.empty_like(out)).copy_(out), state


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


# Compiled calls, whose graphs have no functions of functions -------------------------------------------


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


def largest_future_key(core, scores, q, k):
    """The keys' maximum runs over later positions, and an additive epsilon makes it matter."""
    query, key = core.logarithms(q), core.logarithms(k)
    features = (key - key.amax(dim=(-1, -2), keepdim=True)).exp() + 1e-4
    return (((query - query.amax(dim=-1, keepdim=True)).exp() + 1e-4) @ features.mT).log()


def seed_of_the_batch(core, *tensors):
    """The seed is a sum over the queries: what else is in the batch changes a sequence's output."""
    core.redraw(math.ceil(abs(float(tensors[0].detach().double().nan_to_num().sum())) * 1e7) % 2**31)


# Exchanges between ranks -------------------------------------------------------------------------------


def own_rank_alone(backend, q, k, v, mask, layout):
    """Attention without an exchange, as torch's context_parallel runs it."""
    return backend.core(q, k, v, mask)


def ranks_in_their_order(backend, q, k, v, mask, layout):
    """Right for contiguous segments, wrong for a head-tail layout."""
    return attend_keys(backend, q, k, v, mask, layout._replace(kind="contiguous"))


def gradients_times_the_ranks(backend, q, k, v, mask, layout):
    """The output is right; every rank sums the gradients of all, and the sums are summed again."""
    k, v = (x + (layout.ranks - 1) * (x - x.detach()) for x in (k, v))
    return attend_keys(backend, q, k, v, mask, layout)
