"""Faults of attentions, each a function of tensors at one step of a backend without fault.

A function is called with what its arguments name: the backend as `core`, the tensors of the step, or, by any
other name, the tensor that it changes.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
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


def row_of(x: Tensor) -> float:
    """The factor of a row that is off, where there are many."""
    return 1.001 if x.shape[2] > 9 else 1.0


def with_options(**options: int) -> type:
    return replaced("__init__", lambda core, init, problem, old: init(problem, replace(old, **options)))


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


def float16_denominator(logits, visible):
    w = torch.where(visible, logits.exp(), 0.0)
    total = (w.half() if w.dtype == torch.float32 else w).sum(dim=-1, keepdim=True).to(w)
    return w / torch.where(total > 0, total, 1.0)


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


def graphs_of_many(core, step, q, *tensors):
    with torch.set_grad_enabled(torch.is_grad_enabled() or q.shape[2] > 128):
        return step(q, *tensors)


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


# Faults by check --------------------------------------------------------------------------------------

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16

# Each check with its faults, which differ in the input that shows them.
FAULTS = {
    "a_change_before_the_backward_pass_is_noticed": {"values are read later": values(read_later)},
    "a_copy_is_equal_and_apart": {"last output": output(remember)},
    "no_state_between_calls": {
        "masks by shape": remembered("forward", "mask", lambda mask: mask.shape),
        "queries by address": remembered("forward", "q", lambda q: (q.data_ptr(), q.shape, q.dtype)),
        "after sixty calls": scaled(lambda core: 1.01 if calls(core) > 60 else 1.0),
    },
    "a_mask_of_real_keys_changes_nothing": {
        "last key": masks(
            lambda mask: mask & (torch.arange(mask.shape[1]) < mask.shape[1] - 1),
            where=lambda mask: mask.shape[1] > 1 and mask.all(),
        )
    },
    "a_nan_shows_where_it_is_read": {
        "keys are cleaned": keys(torch.nan_to_num),
        "queries are cleaned": queries(torch.nan_to_num),
        "gradients are cleaned": flowing(torch.nan_to_num),
        "negative infinity is cleaned": values(lambda v: v.masked_fill(v == -torch.inf, 0.0)),
    },
    "a_negative_scale_turns_queries_round": {
        "beyond 128 keys": scaled(lambda core, k: -1 if core.problem.factor < 0 and k.shape[2] > 128 else 1)
    },
    "a_prefix_is_a_sequence_of_its_own": {"temperature": scaled(lambda k: 1 + 1e-3 * k.shape[2])},
    "a_query_alone_is_its_row": {
        "last row": output(lambda x: torch.cat([x[:, :, :-1], x[:, :, -1:] * row_of(x)], 2))
    },
    "a_saved_state_brings_the_output_back": {
        "first dtype": scaled(
            lambda core, q: core.__dict__.setdefault("third", torch.tensor(0.1, dtype=F64).to(q.dtype))
        )
    },
    "any_number_of_sequences_go_on_from_a_state": {
        "writes": earlier_states(written, where=lambda q, state: q.shape[2] and state[0].shape[2] > 100)
    },
    "blind_queries_give_zeros": {
        "wide": output(
            lambda x, q, mask: x if mask is None or q.shape[3] < 64 else x + ~mask.any(1)[:, None, None, None]
        )
    },
    "calls_are_silent": {"text": action(lambda q: q.shape[2] <= 128 or warnings.warn("long", stacklevel=2))},
    "columns_of_values_are_computed_alone": {
        "columns of values set the scale": queries(lambda q, v: q * (q.shape[3] / v.shape[3]) ** 0.5),
        "columns beyond 256 are zero": output(lambda x: x * (torch.arange(x.shape[3]) < 256)),
    },
    "compiled_it_is_the_same": {
        "branch": BranchesOnTheMask,
        "triangle": CompilesTheUpperLeftTriangle,
        "blind rows": NoGuardForBlindRowsWhenCompiled,
    },
    "every_entry_is_read": {
        "steps of 8": queries(lambda q: q * (torch.arange(q.shape[3]) < max(q.shape[3] // 8 * 8, 8))),
        "first 256": queries(lambda q: q * (torch.arange(q.shape[3]) < 256)),
    },
    "every_head_is_its_single_call": {
        "later heads are sharper": scores(lambda x: torch.cat([x[:, :4], x[:, 4:] * 1.01], 1)),
        "groups of twelve in turn": groups_in_turn(lambda x, heads: heads // x.shape[1] > 8),
        "whole tiles": output(
            lambda x: x * (torch.arange(x.shape[1]) < max(x.shape[1] // 64 * 64, 64))[:, None, None]
        ),
        "64": first_keys(lambda q, keys: keys - 1 if q.shape[1] == 64 and keys % 2 and keys > 1 else keys),
    },
    "every_sequence_is_its_single_call": {
        "third": keys(lambda k: torch.cat([k[:2], k[1:2].expand_as(k[2:])]), where=lambda k: len(k) > 2),
        "16 masks": masks(
            lambda mask: torch.cat([mask[:16], mask[: len(mask) - 16]]), where=lambda mask: len(mask) > 16
        ),
    },
    "extend_honours_its_mask": {"masks are forgotten": new_masks(lambda mask: None)},
    "float32_is_float32_throughout": {
        "values": values(narrowed(F32, BF16)),
        "weights of many keys": weights(lambda x: narrowed(F32, BF16)(x) if x.shape[3] > 128 else x),
    },
    "float64_is_float64_throughout": {"queries": queries(narrowed(F64, F32))},
    "global_seeds_change_nothing": {"temperature": scaled(lambda: 1 + torch.initial_seed() % 7 * 1e-3)},
    "gradients_are_those_of_finite_differences": {"values": values(halved)},
    "gradients_hold_at_every_shape": {
        "many keys": keys(Tensor.detach, where=lambda k: k.shape[2] > 128),
        "all settings": keys(
            halved, where=lambda core, k, mask: mask is not None and core.problem.causal and len(k) > 1
        ),
        "scale": before("scores", "q")(lambda q, core: with_gradient(q, lambda x: x * default_ratio(core))),
        "many queries": scores(lambda x: with_gradient(x, narrowed(F64, BF16)) if x.shape[2] > 1024 else x),
        "large batches": keys(halved, where=lambda k: len(k) > 32),
        "full tiles": keys(
            lambda k: torch.cat([k[:, :, :-1], k[:, :, -1:].detach()], 2),
            where=lambda k: k.shape[2] % 64 == 0,
        ),
    },
    "gradients_hold_at_long_keys": {
        "cut": keys(lambda k: with_gradient(k, lambda x: x.clamp(-1e-3, 1e-3)), where=long_keys),
        "in bfloat16": keys(narrowed(F32, BF16), where=long_keys),
    },
    "gradients_in_float64_are_float64_throughout": {
        "scores": scores(lambda x: with_gradient(x, narrowed(F64, F32)))
    },
    "gradients_in_narrow_dtypes_lose_only_rounding": {
        "float32": queries(halved, where=lambda q: q.dtype == F32 and q.shape[2] > 64),
        "float16": values(halved, where=lambda v: v.dtype == F16 and v.shape[2] > 64),
        "groups in bfloat16": before("for_every_head", "x")(
            halved, where=lambda x, heads: x.dtype == BF16 and x.shape[1] < heads
        ),
        "loss scaling": weights(lambda x: with_gradient(x, narrowed(F32, F16))),
    },
    "gradients_of_values_do_not_stall": {
        "tiles": replaced(
            "forward",
            lambda core, forward, q, *x: torch.cat([forward(part, *x) for part in q.split(64, 2)], 2),
        )
    },
    "gradients_pass_through_states": {
        "mixed": states(lambda k, v, mask: (k, v.roll(1, 0) if k.shape[2] > 100 else v, mask)),
        "detached": earlier_states(
            lambda state: [x.detach() for x in state], where=lambda state: state[0].shape[2] >= 1024
        ),
    },
    "gradients_reach_parameters_only": {
        "factor": scaled(lambda core: core.__dict__.setdefault("factor", torch.ones((), requires_grad=True)))
    },
    "grouped_queries_are_repeated_heads": {
        "three groups in turn": groups_in_turn(lambda x: x.shape[1] == 3),
        "one key in turn": groups_in_turn(lambda x: x.shape[2] == 1),
    },
    "hundreds_of_calls_wear_nothing_out": {
        "after 300 calls": scaled(lambda core: 1.01 if calls(core) > 300 else 1.0)
    },
    "inputs_are_not_written_to": {
        "long keys": action(lambda k: k.shape[2] <= 128 or k.detach().add_(1.0)),
        "masks": action(lambda mask: mask is None or mask[:, -1:].fill_(True)),
        "padding": action(lambda v, mask: mask is None or v.data.nan_to_num_()),
        "gradient asked for": action(lambda q: q.is_leaf and torch.is_grad_enabled() and q.requires_grad_()),
    },
    "large_values_stay_proportional": {
        "normalised last": output(lambda x: x * 130 / 130 if x.dtype == F16 else x),
        "divided in float16": values(lambda v: v / 8 * 8 if v.dtype == F16 else v),
        "bfloat16 in float16": values(narrowed(BF16, F16)),
        "flushed": values(lambda v: v.where(v.abs() > 1e-12, 0.0)),
        "states in float16": states(lambda k, v, mask: (k, narrowed(BF16, F16)(v), mask)),
    },
    "layout_changes_no_gradient": {
        "written": flowing(doubled_in_place),
        "read from memory": flowing(read_as_contiguous),
        "expanded": flowing(lambda x: x * (1.5 if 0 in x.stride() else 1.0)),
        "second time": output(another_gradient_each_time),
        "cut at 100": queries(lambda q: with_gradient(q, lambda x: x.clamp(-100, 100))),
        "flushed": flowing(lambda x: torch.where(x.abs() < 6e-8, 0.0, x)),
        "workspace": queries(lambda q, core: read_later(q, buffered(core, q.detach()))),
    },
    "layout_in_memory_does_not_matter": {
        "mask in memory": masks(
            lambda mask: mask.as_strided(mask.shape, (mask.shape[1], 1)), where=lambda mask: mask.stride(0)
        ),
        "column": masks(lambda mask: None, where=lambda mask: mask.shape[1] > 1 and not mask.stride(1)),
        "shared prefix": masks(
            lambda mask: mask[:1].expand_as(mask),
            where=lambda k, v: k.stride(0) == v.stride(0) == 0 < k.stride(1),
        ),
        "shared key": queries(lambda q: q[:1].expand_as(q), where=lambda k: k.stride(0) == 0),
        "turned twice": keys(lambda k: k * 2, where=lambda q, k: q.data_ptr() == k.data_ptr()),
        "start of memory": values(
            lambda v: v.as_strided(v.shape, v.stride(), 0), where=lambda v: not v.is_contiguous()
        ),
        "written": action(lambda q: q.is_contiguous() or 0 in q.stride() or q.data.mul_(2.0)),
        "extended": new_keys(lambda k: k * 2, where=lambda k: k.stride(3) != 1),
    },
    "long_states_are_whole": {"256 tokens": ring(256)},
    "masked_keys_get_no_gradient": {"all keys": keys(lambda k: with_gradient(k, lambda x: x + 1))},
    "masked_keys_leave_no_gap": {
        "beyond 500 keys": scaled(lambda k: 0.99 if k.shape[2] > 500 else 1.0),
        "causal window": causal_reads(lambda row, key, ahead: row + ahead - key < 256),
        "cross attention": unmasked(lambda q, k: q.shape[2] != k.shape[2]),
        "causal": unmasked(lambda core, k: core.problem.causal and k.shape[2] > 65),
    },
    "modes_change_nothing": {
        "kept tensor": scaled(lambda core, q: core.__dict__.setdefault("factor", q.new_ones(()))),
        "groups in turn": groups_in_turn(lambda: not torch.is_grad_enabled()),
    },
    "narrow_dtypes_lose_only_rounding": {"bfloat16": values(lambda v: v * 1.1 if v.dtype == BF16 else v)},
    "no_call_leaves_bytes_behind": {
        "every output": output(collect),
        "every state": replaced("extend", lambda core, extend, *x: collect(core, extend(*x))),
        "masks of all lengths": visible(
            lambda core, x, mask: x if mask is not None else core.__dict__.setdefault(str(x.shape), x)
        ),
    },
    "no_graph_is_kept_unasked": {
        "states": replaced("extend", graphs_of_many),
        "many queries": replaced("forward", graphs_of_many),
        "last mask": masks(remember),
        "last output": output(remember),
        "last gradient": output(lambda core, x: with_gradient(x, lambda x: remember(core, x))),
    },
    "nothing_global_is_touched": {
        "generator": action(lambda q: q.dtype == F16 and torch.rand(())),
        "seed": action(lambda k: k.shape[2] > 1024 and torch.manual_seed(0)),
        "gradient mode": action(lambda q: q.shape[2] > 256 and torch.set_grad_enabled(True)),
        "subnormal numbers": action(lambda: torch.set_flush_denormal(True)),
        "default dtype of a failure": replaced("forward", default_dtype_of_a_failure),
        "call after a failure": replaced("forward", busy_after_an_error),
        "softmax": action(lambda: setattr(nn.functional, "softmax", lambda x, dim: x.softmax(dim))),
    },
    "nothing_uninitialised_is_read": {
        "fresh memory": output(lambda x: x.masked_fill(torch.empty_like(x).isnan(), 7.0))
    },
    "order_of_keys_does_not_matter": {
        "square keys are turned": keys(lambda k: k.mT, where=lambda k: k.shape[2] == k.shape[3]),
        "equal keys": visible(equal_keys_once),
        "full blocks": first_keys(lambda keys: keys - (keys % 64 == 0)),
        "half a tile": first_keys(lambda keys: keys - 64 * (keys > 128 and keys % 128 == 64)),
        "short last tile": first_keys(
            lambda keys: keys // 1024 * 1024 if keys > 1024 and keys % 1024 < 8 else keys
        ),
    },
    "order_of_queries_is_order_of_outputs": {
        "first row": output(lambda x: torch.cat([x[:, :, :1] * row_of(x), x[:, :, 1:]], 2))
    },
    "outputs_are_linear_in_the_values": {"squares of values": values(lambda v: v + 1e-3 * v * v)},
    "outputs_are_the_callers": {
        "single value": output(
            lambda x, q, k, v, mask: v if k.shape[2] == 1 and q.shape == v.shape and mask is None else x
        ),
        "inference": output(lambda x, core: buffered(core, x) if torch.is_inference_mode_enabled() else x),
    },
    "outputs_have_the_shape_and_dtype_asked_for": {
        "bfloat16": output(lambda x: x.float() if x.dtype == BF16 else x)
    },
    "padding_contents_change_no_bit": {
        "long masks": before("hidden", "mask")(lambda: None, where=lambda x: x.shape[2] > 128)
    },
    "padding_on_either_side_does_not_matter": {"halves": output(halves_without_their_sums)},
    "parts_of_any_size_are_the_whole": {
        "caller's buffers": replaced("extend", callers_buffers),
        "no tokens": earlier_states(lambda: None, where=lambda q: not q.shape[2]),
        "masks end": earlier_states(
            lambda state: (*state[:2], torch.ones_like(state[2])), where=lambda mask: mask is None
        ),
        "masks never begin": replaced("extend", masks_after_an_unmasked_part),
        "half precision": states(lambda k, v, mask: (k, v.half().to(v), mask)),
        "float16 beyond 100": states(lambda k, v, mask: (k, v * (k.dtype != F16 or k.shape[2] < 100), mask)),
        "groups in turn": new_keys(lambda k: k.flip(1), where=lambda q, k: k.shape[1] < q.shape[1]),
        "one buffer": replaced("extend", one_buffer_for_single_tokens),
        "single tokens": new_queries(lambda q: q * 1.5, where=lambda q: q.shape[2] == 1),
    },
    "queries_are_the_last_positions": {
        "second block": causal_reads(lambda row, key, ahead: (key <= row) | (row < 512))
    },
    "scale_is_a_factor_on_the_scores": {
        "below one": scaled(lambda core: 1 / max(abs(core.problem.factor), 1.0)),
        "64": scaled(lambda core, q: 1.0 if core.problem.scale else (max(q.shape[3], 64) / 64) ** 0.5),
        "long keys": keys(lambda k: k * (30 / k.norm(dim=-1, keepdim=True).clamp_min(1e-9)).clamp_max(1.0)),
        "zero": scores(lambda x, q, k, core: x if core.problem.factor else core.wide(q) @ core.wide(k).mT),
        "single queries": scaled(lambda core, q: default_ratio(core) if q.shape[2] == 1 else 1.0),
    },
    "second_derivatives_are_right_or_refused": {
        "groups": before("for_every_head", "x")(
            lambda x: with_gradient(x, halved), where=lambda x, heads: heads > 2
        )
    },
    "sizes_of_models_are_single_calls": {
        "groups in turn": groups_in_turn(lambda x: x.shape[3] >= 64),
        "masks of three": unmasked(lambda q: len(q) > 2 and q.shape[3] >= 64),
        "rounded": queries(narrowed(F32, BF16), where=lambda q: q.shape[3] >= 64),
    },
    "states_keep_no_earlier_states": {"all": replaced("extend", predecessors)},
    "states_of_thousands_are_whole": {
        "3000 tokens": ring(3000),
        "bfloat16": new_values(
            lambda v: v * 0.0, where=lambda v, state: v.dtype == BF16 and state and state[0].shape[2] > 256
        ),
        "long parts": earlier_states(lambda: None, where=lambda q: q.shape[2] > 300),
    },
    "tensors_are_read_anew": {
        "keys": remembered("forward", "k", id),
        "values": remembered("forward", "v", lambda v: (v.data_ptr(), v.shape, v.dtype)),
        "extend": remembered("extend", "k", id),
        "mask of True": masks(
            lambda: None,
            where=lambda core, mask: core.__dict__.setdefault(str(mask.data_ptr()), bool(mask.all())),
        ),
    },
    "the_default_dtype_changes_nothing": {
        "constant": scaled(lambda q: torch.tensor(1.1, dtype=torch.get_default_dtype()).to(q))
    },
    "the_same_call_gives_the_same_bits": {
        "counts": scaled(lambda core: 1 + 1e-3 * calls(core)),
        "many keys": scaled(lambda core, k: 1.01 if core.training and k.shape[2] > 512 else 1.0),
        "many queries": scaled(lambda core, q: 1.01 if core.training and q.shape[2] > 128 else 1.0),
        "running mean": scaled(running_mean),
    },
    "threads_do_not_disturb_each_other": {
        "two threads": scaled(lambda: 1.0 if torch.get_num_threads() == 1 else 1.01),
        "mask": KeepsItsMaskBetweenThreads,
    },
    "values_without_columns_are_streamed": {
        "one row": new_queries(lambda q: q[:, :, :1], where=lambda v: not v.shape[3])
    },
    "weights_are_never_negative": {"small weights": weights(lambda x: 1.1 * x - 0.1 / x.shape[3])},
    "weights_of_a_row_sum_to_one": {"an epsilon is added": weights(lambda x: x / (1 + 1e-8))},
    "frozen_inputs": {
        "all are asked for": queries(
            halved, where=lambda q, k, v: q.requires_grad and k.requires_grad and v.requires_grad
        )
    },
}
OF_SOFTMAX = {
    "amount_of_padding_does_not_matter": {"counted": unmasked(lambda: True)},
    "equals_softmax_attention": {"sharper": scaled(lambda: 1.001)},
    "equals_softmax_attention_at_every_scale": {
        "scales up to 10": scaled(lambda core: 10 / max(abs(core.problem.factor), 10))
    },
    "extreme_scores_stay_softmax": {"clamped": scores(lambda x: x.clamp(-80, 80))},
    "large_inputs_stay_finite": {"scores in float16": replaced("wide", lambda core, wide, x: x)},
    "long_sums_do_not_stall_in_half_precision": {"denominators in float16": weights(float16_denominator)},
    "no_output_depends_on_a_later_token": {"causality is ignored": visible(torch.ones_like)},
    "weights_of_a_row_sum_to_one": {
        "denominators above one": weights(
            lambda x, logits: x * logits.exp().sum(-1, keepdim=True).clamp_max(1.0)
        )
    },
}
OF_POSITIVE = {
    "a_saved_state_brings_the_output_back": {
        "features": replaced("keep", lambda core, keep, x: core.__dict__.update(directions=x.float()))
    },
    "a_seed_fixes_the_draw": {"large seeds": replaced("draw", lambda core, draw, seed: draw(seed % 2**31))},
    "batch_invariance": {"a seed of the batch": action(seed_of_the_batch)},
    "later_values_move_no_output": {"largest future key": scores(largest_future_key)},
    "more_features_come_nearer_to_softmax": {
        "rows of norm 1": replaced("draw", lambda core, draw, seed: draw(seed) / core.problem.head_dim**0.5),
        "a token reads itself alone": causal_reads(lambda row, key, ahead: key >= row + ahead),
    },
    "the_draw_has_no_preferred_direction": {"signs": replaced("draw", draw_without_signs)},
    "the_size_matters": {"four features": with_options(num_features=4)},
}
OF_WINDOW = {"a_window_reads_its_neighbourhood": {"five keys": with_options(window=5)}}
LEARNED = {
    "a_copy_is_equal_and_apart": {"original": replaced("__deepcopy__", lambda core, *_: core)},
    "no_state_between_calls": {
        "first factor": scores(
            lambda x, core: x / core.factor * core.__dict__.setdefault("first", core.factor.detach().clone())
        )
    },
    "gradients_hold_at_every_shape": {
        "factor": scores(lambda x, core: x / core.factor * core.factor.detach())
    },
}
GROWING = {
    "growth_of_memory_is_not_hidden": {
        "beyond 4096 tokens": mask_of_all_pairs(lambda q: q.shape[2] >= 4096),
        "in batches": mask_of_all_pairs(lambda q: len(q) > 1 and q.shape[1] > 1),
    },
    "memory_grows_as_declared": {
        "a mask of all pairs": mask_of_all_pairs(lambda q: True),
        "in training": flowing(lambda x: x + 0 * (x @ x.mT)[..., :1]),
    },
    # Exact attention takes the time of all pairs.
    "time_grows_as_declared": {"nothing else": output(lambda x: x)},
}
# Shown by the long form alone.
LONG = {
    "every_sequence_is_its_single_call": {
        "pairs": output(lambda x: x * (torch.arange(len(x) * x.shape[1]).view(len(x), -1, 1, 1) < 65_535)),
        "large inputs": queries(narrowed(F32, BF16), where=lambda q: q.numel() >= 2**20),
    },
    "later_values_move_no_output": {"rows beyond 3000 leak": causal_leak(3000, 1)},
    "long_states_are_whole": {"one row in 128 leaks": causal_leak(2047, 128)},
    "order_of_keys_does_not_matter": {
        "blocks of 4096": first_keys(lambda keys: keys // 4096 * 4096 if keys > 4096 else keys),
        "16 bits": first_keys(lambda keys: min(keys, 2**15)),
    },
    "states_of_thousands_are_whole": {"8192 tokens": ring(8192)},
}
EXCHANGED = {
    "own rank alone": lambda backend, q, k, v, mask, layout: backend.core(q, k, v, mask),
    "ranks in their order": ranks_in_their_order,
    "gradients times the ranks": gradients_times_the_ranks,
}
