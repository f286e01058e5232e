"""Faults of calls by check: of calls repeated, streamed, differentiated, compiled."""

import time
import warnings
from itertools import count
from typing import Any

import fault_steps as at
import torch
from base_cores import with_gradient
from fault_steps import BF16, F16, F32, F64
from torch import Tensor, nn


def halved(x: Tensor) -> Tensor:
    """x with half its gradient."""
    return with_gradient(x, lambda gradient: gradient * 0.5)


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


def upper_left_triangle(x, core):
    return x.tril() if core.problem.causal and torch.compiler.is_compiling() else x


def unguarded_blind_rows(x, mask):
    if mask is None or not torch.compiler.is_compiling():
        return x
    return x / mask.any(dim=1)[:, None, None, None]


class KeepsItsMaskBetweenThreads:
    def forward(self, q, k, v, key_mask):
        self.__dict__["mask"] = key_mask
        # Other threads store theirs meanwhile.
        time.sleep(1e-4)
        return super().forward(q, k, v, key_mask)

    def visible(self, q, k, key_mask):
        return super().visible(q, k, self.__dict__["mask"])


OF_CALLS = {
    "a_change_before_the_backward_pass_is_noticed": {"values are read later": at.values(read_later)},
    "no_state_between_calls": {
        "masks by shape": at.remembered("forward", "mask", lambda mask: mask.shape),
        "queries by address": at.remembered("forward", "q", lambda q: (q.data_ptr(), q.shape, q.dtype)),
        "keys": at.remembered("forward", "k", id),
        "versions": at.remembered("forward", "k", lambda k: (id(k), k._version)),
        "values": at.remembered("forward", "v", lambda v: (v.data_ptr(), v.shape, v.dtype)),
        "extend": at.remembered("extend", "k", id),
        "mask of True": at.masks(
            lambda: None,
            where=lambda core, mask: core.__dict__.setdefault(str(mask.data_ptr()), bool(mask.all())),
        ),
        "after sixty calls": at.scaled(lambda core: 1.01 if calls(core) > 60 else 1.0),
        "after 300 calls": at.scaled(lambda core: 1.01 if calls(core) > 300 else 1.0),
    },
    "a_saved_state_brings_the_output_back": {
        "last output": at.output(remember),
        "first dtype": at.scaled(
            lambda core, q: core.__dict__.setdefault("third", torch.tensor(0.1, dtype=F64).to(q.dtype))
        ),
    },
    "any_number_of_sequences_go_on_from_a_state": {
        "writes": at.earlier_states(written, where=lambda q, state: q.shape[2] and state[0].shape[2] > 100)
    },
    "compiled_it_is_the_same": {
        "branch": at.masks(lambda mask: None, where=lambda mask: mask.all()),
        "triangle": at.visible(upper_left_triangle),
        "blind rows": at.output(unguarded_blind_rows),
    },
    "global_settings_change_nothing": {
        "temperature": at.scaled(lambda: 1 + torch.initial_seed() % 7 * 1e-3),
        "constant": at.scaled(lambda q: torch.tensor(1.1, dtype=torch.get_default_dtype()).to(q)),
        "device": at.scores(lambda x: x * torch.ones(())),
        "heads": at.scaled(lambda core: 1.0 if core.problem.num_heads else 1.5),
        "longest": at.scaled(lambda core: 1.0 if core.problem.max_tokens else 1.5),
    },
    "gradients_are_those_of_finite_differences": {"values": at.values(halved)},
    "gradients_hold_at_every_shape": {
        "all settings": at.keys(
            halved, where=lambda core, k, mask: mask is not None and core.problem.causal and len(k) > 1
        ),
        "scale": at.before("scores", "q")(
            lambda q, core: with_gradient(q, lambda x: x * at.default_ratio(core))
        ),
        "many queries": at.scores(
            lambda x: with_gradient(x, at.narrowed(F64, BF16)) if x.shape[2] > 1024 else x
        ),
        "large batches": at.keys(halved, where=lambda k: len(k) > 32),
        "1024 keys": at.keys(halved, where=lambda k: k.shape[2] == 1024),
        "full tiles": at.keys(
            lambda k: torch.cat([k[:, :, :-1], k[:, :, -1:].detach()], 2),
            where=lambda k: k.shape[2] % 64 == 0,
        ),
    },
    "gradients_hold_at_long_keys": {
        "cut": at.keys(lambda k: with_gradient(k, lambda x: x.clamp(-1e-3, 1e-3)), where=long_keys),
        "in bfloat16": at.keys(at.narrowed(F32, BF16), where=long_keys),
    },
    "gradients_in_narrow_dtypes_lose_only_rounding": {
        "float32": at.queries(halved, where=lambda q: q.dtype == F32 and q.shape[2] > 64),
        "float16": at.values(halved, where=lambda v: v.dtype == F16 and v.shape[2] > 64),
        "groups in bfloat16": at.before("for_every_head", "x")(
            halved, where=lambda x, heads: x.dtype == BF16 and x.shape[1] < heads
        ),
        "loss scaling": at.weights(lambda x: with_gradient(x, at.narrowed(F32, F16))),
    },
    "gradients_pass_through_states": {
        "mixed": at.states(lambda k, v, mask: (k, v.roll(1, 0) if k.shape[2] > 100 else v, mask)),
        "detached": at.earlier_states(
            lambda state: [x.detach() for x in state], where=lambda state: state[0].shape[2] >= 1024
        ),
    },
    "layout_changes_no_gradient": {
        "written": at.flowing(doubled_in_place),
        "read from memory": at.flowing(read_as_contiguous),
        "expanded": at.flowing(lambda x: x * (1.5 if 0 in x.stride() else 1.0)),
        "sum": at.flowing(lambda x: x * (1.0 if any(x.stride()) else 2.0)),
        "mean over tokens": at.flowing(lambda x: x * (2.0 if x.stride(2) == 0 < x.stride(3) else 1.0)),
        "64 columns": at.flowing(lambda x: x * (2.0 if 0 in x.stride() and x.shape[3] == 64 else 1.0)),
        "offset": at.flowing(lambda x: x * (2.0 if x.storage_offset() and x.stride(3) == 1 else 1.0)),
        "second time": at.output(another_gradient_each_time),
        "cut at 100": at.queries(lambda q: with_gradient(q, lambda x: x.clamp(-100, 100))),
        "flushed": at.flowing(lambda x: torch.where(x.abs() < 6e-8, 0.0, x)),
        "workspace": at.queries(lambda q, core: read_later(q, buffered(core, q.detach()))),
    },
    "long_states_are_whole": {"256 tokens": at.ring(256)},
    "long_sums_do_not_stall_in_half_precision": {
        "tiles": at.replaced(
            "forward",
            lambda core, forward, q, *x: torch.cat([forward(part, *x) for part in q.split(64, 2)], 2),
        )
    },
    "modes_change_nothing": {
        "fresh memory": at.output(lambda x: x.masked_fill(torch.empty_like(x).isnan(), 7.0)),
        "kept tensor": at.scaled(lambda core, q: core.__dict__.setdefault("factor", q.new_ones(()))),
        "groups in turn": at.groups_in_turn(lambda: not torch.is_grad_enabled()),
    },
    "no_call_leaves_bytes_behind": {
        "earlier states": at.replaced("extend", predecessors),
        "every output": at.output(collect),
    },
    "no_graph_is_kept_unasked": {
        "states": at.replaced("extend", graphs_of_many),
        "last mask": at.masks(remember),
        "last output": at.output(remember),
        "last gradient": at.output(lambda core, x: with_gradient(x, lambda x: remember(core, x))),
        "factor": at.scaled(
            lambda core: core.__dict__.setdefault("factor", torch.ones((), requires_grad=True))
        ),
    },
    "nothing_global_is_touched": {
        "text": at.action(lambda q: q.shape[2] <= 128 or warnings.warn("long", stacklevel=2)),
        "generator": at.action(lambda q: q.dtype == F16 and torch.rand(())),
        "seed": at.action(lambda k: k.shape[2] > 1024 and torch.manual_seed(0)),
        "gradient mode": at.action(lambda q: q.shape[2] > 256 and torch.set_grad_enabled(True)),
        "subnormal numbers": at.action(lambda: torch.set_flush_denormal(True)),
        "default dtype of a failure": at.replaced("forward", default_dtype_of_a_failure),
        "call after a failure": at.replaced("forward", busy_after_an_error),
        "softmax": at.action(lambda: setattr(nn.functional, "softmax", lambda x, dim: x.softmax(dim))),
    },
    "outputs_are_not_aliased": {
        "single value": at.output(
            lambda x, q, k, v, mask: v if k.shape[2] == 1 and q.shape == v.shape and mask is None else x
        ),
        "inference": at.output(lambda x, core: buffered(core, x) if torch.is_inference_mode_enabled() else x),
    },
    "padding_contents_change_no_bit": {
        "masks are forgotten": at.new_masks(lambda mask: None),
        "all keys": at.keys(lambda k: with_gradient(k, lambda x: x + 1)),
    },
    "parts_of_any_size_are_the_whole": {
        "caller's buffers": at.replaced("extend", callers_buffers),
        "no tokens": at.earlier_states(lambda: None, where=lambda q: not q.shape[2]),
        "masks end": at.earlier_states(
            lambda state: (*state[:2], torch.ones_like(state[2])), where=lambda mask: mask is None
        ),
        "masks never begin": at.replaced("extend", masks_after_an_unmasked_part),
        "half precision": at.states(lambda k, v, mask: (k, v.half().to(v), mask)),
        "float16 beyond 100": at.states(
            lambda k, v, mask: (k, v * (k.dtype != F16 or k.shape[2] < 100), mask)
        ),
        "groups in turn": at.new_keys(lambda k: k.flip(1), where=lambda q, k: k.shape[1] < q.shape[1]),
        "one buffer": at.replaced("extend", one_buffer_for_single_tokens),
        "single tokens": at.new_queries(lambda q: q * 1.5, where=lambda q: q.shape[2] == 1),
        "one row": at.new_queries(lambda q: q[:, :, :1], where=lambda v: not v.shape[3]),
    },
    "second_derivatives_are_right_or_refused": {
        "groups": at.before("for_every_head", "x")(
            lambda x: with_gradient(x, halved), where=lambda x, heads: heads > 2
        )
    },
    "very_long_states_are_whole": {
        "3000 tokens": at.ring(3000),
        "bfloat16": at.new_values(
            lambda v: v * 0.0, where=lambda v, state: v.dtype == BF16 and state and state[0].shape[2] > 256
        ),
    },
    "the_same_call_gives_the_same_bits": {
        "many keys": at.scaled(lambda core, k: 1.01 if core.training and k.shape[2] > 512 else 1.0),
        "many queries": at.scaled(lambda core, q: 1.01 if core.training and q.shape[2] > 128 else 1.0),
        "running mean": at.scaled(running_mean),
        "64 entries": at.scaled(lambda core, q: 1.01 if core.training and q.shape[3] == 64 else 1.0),
    },
    "threads_do_not_disturb_each_other": {
        "two threads": at.scaled(lambda: 1.0 if torch.get_num_threads() == 1 else 1.01),
        "mask": KeepsItsMaskBetweenThreads,
    },
    "frozen_inputs": {
        "all are asked for": at.queries(
            halved, where=lambda q, k, v: q.requires_grad and k.requires_grad and v.requires_grad
        )
    },
}
