"""Faults that published code has, or could have: each is caught by the check of its promise.

Most are laid over an exact base and over one that is right without being softmax attention, for which nothing
but relations between calls can tell.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace

import faults
import pytest
import torch
from faults import (
    action,
    before,
    causal_leak,
    causal_reads,
    earlier_states,
    first_keys,
    flowing,
    groups_in_turn,
    halved,
    keys,
    masks,
    narrowed,
    new_keys,
    new_masks,
    new_queries,
    new_values,
    output,
    queries,
    remembered,
    replaced,
    ring,
    scaled,
    scores,
    states,
    unmasked,
    values,
    visible,
    weights,
)
from torch import Tensor, nn
from twins import Kernel, LinearMemory, Positive, Softmax, Tempered, Window, WindowOptions, with_gradient

import efficient_attn as ea
from efficient_attn.backends.linear_attention import RandomFeatureOptions
from efficient_attn.distributed.calls import EXCHANGES, Exchange
from efficient_attn.registry import BackendSpec, Capabilities, NoOptions
from efficient_attn.testing import check_names

RANDOM = Capabilities(causal=True, second_derivatives=True, time_growth=2, memory_growth=2)
EXACT = replace(RANDOM, exact=True, sharded="keys")
TWO_WHOLE = Capabilities(causal=False, cross=False, key_mask=False, exact=True, time_growth=1)


def _spec(core: Callable[..., nn.Module], capabilities: Capabilities, options: type = NoOptions, size=None):
    return BackendSpec(
        name=core.__name__,
        summary=f"{core.__name__}, a backend of the tests.",
        options_type=options,
        size_option=size,
        capabilities=capabilities,
        builder=core,
    )


BASES = {
    "softmax": _spec(Softmax, EXACT),
    "kernel": _spec(Kernel, replace(RANDOM, approximates_softmax=False)),
    "tempered": _spec(Tempered, replace(RANDOM, approximates_softmax=False)),
    "linear-memory": _spec(LinearMemory, TWO_WHOLE),
    "positive": _spec(Positive, RANDOM, RandomFeatureOptions, "num_features"),
    "window": _spec(Window, replace(RANDOM, cross=False), WindowOptions, "window"),
}
# Differentiable once.
ONCE = replace(EXACT, second_derivatives=False, sharded=None)


def row_of(x: Tensor) -> float:
    """The factor of a row that is off, where there are many."""
    return 1.001 if x.shape[2] > 9 else 1.0


def with_options(**options: int) -> type:
    return replaced("__init__", lambda core, init, problem, old: init(problem, replace(old, **options)))


F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16

# Each check with its faults. Those of a check differ in the input that shows them.
FAULTS = {
    "a_change_before_the_backward_pass_is_noticed": {"values are read later": values(faults.read_later)},
    "a_copy_is_equal_and_apart": {"last output": output(faults.remember)},
    "a_hundred_calls_leave_no_trace": {
        "masks by shape": remembered("forward", "mask", lambda mask: mask.shape),
        "queries by address": remembered("forward", "q", lambda q: (q.data_ptr(), q.shape, q.dtype)),
        "after sixty calls": scaled(lambda core: 1.01 if faults.calls(core) > 60 else 1.0),
    },
    "a_mask_of_real_keys_changes_nothing": {
        "last key": masks(
            lambda mask: mask & (torch.arange(mask.shape[1]) < max(mask.shape[1] - 1, 1)),
            where=lambda mask: mask.all(),
        )
    },
    "a_nan_shows_where_it_is_read": {
        "values are cleaned": values(torch.nan_to_num),
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
        "writes": earlier_states(
            faults.written, where=lambda q, state: q.shape[2] and state[0].shape[2] > 100
        )
    },
    "blind_queries_give_zeros": {
        "uniform": weights(
            lambda x, core, visible: (
                x if core.problem.head_dim < 64 else x.where(visible.any(-1, keepdim=True), 1 / x.shape[3])
            )
        )
    },
    "calls_are_silent": {
        "warning": action(lambda q: q.shape[2] <= 128 or warnings.warn("long", stacklevel=2))
    },
    "columns_of_values_are_computed_alone": {
        "columns of values set the scale": queries(lambda q, v: q * (q.shape[3] / v.shape[3]) ** 0.5),
        "columns beyond 256 are zero": output(lambda x: x * (torch.arange(x.shape[3]) < 256)),
    },
    "compiled_it_is_the_same": {
        "branch": faults.BranchesOnTheMask,
        "triangle": faults.CompilesTheUpperLeftTriangle,
        "blind rows": faults.NoGuardForBlindRowsWhenCompiled,
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
        "64 heads": first_keys(
            lambda q, keys: keys - 1 if q.shape[1] == 64 and keys % 2 and keys > 1 else keys
        ),
    },
    "every_sequence_is_its_single_call": {
        "third": keys(lambda k: torch.cat([k[:2], k[1:2].expand_as(k[2:])]), where=lambda k: len(k) > 2),
        "16 masks": masks(
            lambda mask: torch.cat([mask[:16], mask[: len(mask) - 16]]), where=lambda mask: len(mask) > 16
        ),
    },
    "extend_honours_its_mask": {"masks are forgotten": new_masks(lambda mask: None)},
    "float32_is_float32_throughout": {
        "keys": keys(narrowed(F32, F16)),
        "values": values(narrowed(F32, BF16)),
        "weights of many keys": weights(lambda x: narrowed(F32, BF16)(x) if x.shape[3] > 128 else x),
    },
    "float64_is_float64_throughout": {
        "queries": queries(narrowed(F64, F32)),
        "values": values(narrowed(F64, F32)),
    },
    "global_seeds_change_nothing": {"temperature": scaled(lambda: 1 + torch.initial_seed() % 7 * 1e-3)},
    "gradients_are_those_of_finite_differences": {"values": values(halved)},
    "gradients_hold_at_every_shape": {
        "many keys": keys(Tensor.detach, where=lambda k: k.shape[2] > 128),
        "all settings": keys(
            halved, where=lambda core, k, mask: mask is not None and core.problem.causal and len(k) > 1
        ),
        "groups": before("for_every_head", "x")(halved, where=lambda x, heads: x.shape[1] < heads),
        "default scale": before("scores", "q")(
            lambda q, core: with_gradient(q, lambda x: x * faults.default_ratio(core))
        ),
        "many queries": scores(lambda x: with_gradient(x, narrowed(F64, BF16)) if x.shape[2] > 1024 else x),
        "large batches": keys(halved, where=lambda k: len(k) > 32),
        "full tiles": keys(
            lambda k: torch.cat([k[:, :, :-1], k[:, :, -1:].detach()], 2),
            where=lambda k: k.shape[2] % 64 == 0,
        ),
    },
    "gradients_hold_at_long_keys": {
        "cut": keys(lambda k: with_gradient(k, lambda x: x.clamp(-1e-3, 1e-3)), where=faults.long_keys),
        "in bfloat16": keys(narrowed(F32, BF16), where=faults.long_keys),
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
        "after 300 calls": scaled(lambda core: 1.01 if faults.calls(core) > 300 else 1.0)
    },
    "inputs_are_not_written_to": {
        "long keys": action(lambda k: k.shape[2] <= 128 or k.detach().add_(1.0)),
        "masks": action(lambda mask: mask is None or mask[:, -1:].fill_(True)),
        "padding": action(lambda v, mask: mask is None or v.data.nan_to_num_()),
        "gradient written": action(lambda q: q.is_leaf and setattr(q, "grad", torch.zeros_like(q))),
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
        "written": flowing(faults.doubled_in_place),
        "read from memory": flowing(faults.read_as_contiguous),
        "expanded": flowing(lambda x: x * (1.5 if 0 in x.stride() else 1.0)),
        "second time": output(faults.another_gradient_each_time),
        "cut at 100": queries(lambda q: with_gradient(q, lambda x: x.clamp(-100, 100))),
        "flushed": flowing(lambda x: torch.where(x.abs() < 6e-8, 0.0, x)),
        "workspace": queries(lambda q, core: faults.read_later(q, faults.buffered(core, q.detach()))),
    },
    "layout_in_memory_does_not_matter": {
        "mask in memory": masks(
            lambda mask: mask.as_strided(mask.shape, (mask.shape[1], 1)), where=lambda mask: mask.stride(0)
        ),
        "mask of a column": masks(
            lambda mask: None, where=lambda mask: mask.shape[1] > 1 and not mask.stride(1)
        ),
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
        "every output": output(faults.collect),
        "every state": replaced("extend", lambda core, extend, *x: faults.collect(core, extend(*x))),
        "masks of all lengths": visible(
            lambda core, x, mask: x if mask is not None else core.__dict__.setdefault(str(x.shape), x)
        ),
    },
    "no_graph_is_kept_unasked": {
        "states": replaced("extend", faults.with_graphs),
        "many queries": replaced(
            "forward",
            lambda core, forward, q, *x: (
                faults.with_graphs(core, forward, q, *x) if q.shape[2] > 256 else forward(q, *x)
            ),
        ),
        "last queries": queries(faults.remember),
        "last mask": masks(faults.remember),
        "last output": output(faults.remember),
        "last gradient": output(lambda core, x: with_gradient(x, lambda x: faults.remember(core, x))),
    },
    "nothing_global_is_touched": {
        "matmul precision": action(lambda: torch.set_float32_matmul_precision("medium")),
        "threads": action(lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        "generator": action(lambda q: q.dtype == F16 and torch.rand(())),
        "seed": action(lambda k: k.shape[2] > 1024 and torch.manual_seed(0)),
        "gradient mode": action(lambda q: q.shape[2] > 256 and torch.set_grad_enabled(True)),
        "subnormal numbers": action(lambda: torch.set_flush_denormal(True)),
        "default dtype of a failure": replaced("forward", faults.default_dtype_of_a_failure),
        "call after a failure": replaced("forward", faults.busy_after_an_error),
        "softmax": action(lambda: setattr(nn.functional, "softmax", lambda x, dim: x.softmax(dim))),
    },
    "nothing_uninitialised_is_read": {
        "fresh memory": output(lambda x: x.masked_fill(torch.empty_like(x).isnan(), 7.0))
    },
    "order_of_keys_does_not_matter": {
        "square keys are turned": keys(lambda k: k.mT, where=lambda k: k.shape[2] == k.shape[3]),
        "equal keys": visible(faults.equal_keys_once),
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
        "inference mode": output(
            lambda x, core: faults.buffered(core, x) if torch.is_inference_mode_enabled() else x
        ),
    },
    "outputs_have_the_shape_and_dtype_asked_for": {
        "bfloat16": output(lambda x: x.float() if x.dtype == BF16 else x)
    },
    "padding_contents_change_no_bit": {
        "long masks": before("hidden", "mask")(lambda: None, where=lambda x: x.shape[2] > 128)
    },
    "padding_on_either_side_does_not_matter": {"halves": output(faults.halves_without_their_sums)},
    "parts_of_any_size_are_the_whole": {
        "caller's buffers": replaced("extend", faults.callers_buffers),
        "no tokens": earlier_states(lambda: None, where=lambda q: not q.shape[2]),
        "later masks": new_masks(lambda: None, where=lambda state: state is not None),
        "masks end": earlier_states(
            lambda state: (*state[:2], torch.ones_like(state[2])), where=lambda mask: mask is None
        ),
        "masks never begin": replaced("extend", faults.masks_after_an_unmasked_part),
        "half precision": states(lambda k, v, mask: (k, v.half().to(v), mask)),
        "float16 ends at 100": states(
            lambda k, v, mask: (
                (k[:, :, -100:], v[:, :, -100:], mask[:, -100:]) if k.dtype == F16 else (k, v, mask)
            )
        ),
        "groups in turn": new_keys(lambda k: k.flip(1), where=lambda q, k: k.shape[1] < q.shape[1]),
        "one buffer": replaced("extend", faults.one_buffer_for_single_tokens),
        "single tokens": new_queries(lambda q: q * 1.5, where=lambda q: q.shape[2] == 1),
        "positive scale": new_queries(torch.neg, where=lambda core: core.problem.factor < 0),
    },
    "queries_are_the_last_positions": {
        "second block": causal_reads(lambda row, key, ahead: (key <= row) | (row < 512))
    },
    "scale_is_a_factor_on_the_scores": {
        "below one": scaled(lambda core: 1 / max(abs(core.problem.factor), 1.0)),
        "64 entries": scaled(
            lambda core, q: 1.0 if core.problem.scale else (max(q.shape[3], 64) / 64) ** 0.5
        ),
        "long keys": keys(lambda k: k * (30 / k.norm(dim=-1, keepdim=True).clamp_min(1e-9)).clamp_max(1.0)),
        "zero": scores(lambda x, q, k, core: x if core.problem.factor else core.wide(q) @ core.wide(k).mT),
        "single queries": scaled(lambda core, q: faults.default_ratio(core) if q.shape[2] == 1 else 1.0),
    },
    "second_derivatives_are_right_or_refused": {
        "groups": before("for_every_head", "x")(
            lambda x: with_gradient(x, halved), where=lambda x, heads: heads > 2
        )
    },
    "sizes_of_models_are_single_calls": {
        "groups in turn": groups_in_turn(lambda x: x.shape[3] >= 64),
        "masks of three": unmasked(lambda q: len(q) > 2 and q.shape[3] >= 64),
        "layout": queries(
            lambda q: q.roll(1, 2),
            where=lambda q: q.stride(1) < q.stride(2) and q.shape[1] > 1 and q.shape[3] >= 64,
        ),
        "rounded": queries(narrowed(F32, BF16), where=lambda q: q.shape[3] >= 64),
    },
    "states_keep_no_earlier_states": {"all": replaced("extend", faults.predecessors)},
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
        "masks": remembered("forward", "mask", id),
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
        "draws anew": scaled(
            lambda core: (
                1 + torch.rand((), generator=core.__dict__.setdefault("generator", torch.Generator()))
            )
        ),
        "training of many keys": scaled(lambda core, k: 1.01 if core.training and k.shape[2] > 512 else 1.0),
        "training of many queries": scaled(
            lambda core, q: 1.01 if core.training and q.shape[2] > 128 else 1.0
        ),
        "running mean": scaled(faults.running_mean),
    },
    "threads_do_not_disturb_each_other": {
        "two threads": scaled(lambda: 1.0 if torch.get_num_threads() == 1 else 1.01),
        "mask": faults.KeepsItsMaskBetweenThreads,
    },
    "values_without_columns_are_streamed": {
        "no rows": replaced(
            "extend",
            lambda core, extend, q, k, v, state, mask: (
                extend(q, k, v, state, mask) if v.shape[3] else (q.new_zeros(*q.shape[:2], 0, 0), state)
            ),
        )
    },
    "weights_are_never_negative": {"small weights": weights(lambda x: 1.1 * x - 0.1 / x.shape[3])},
    "weights_of_a_row_sum_to_one": {"an epsilon is added": weights(lambda x: x / (1 + 1e-8))},
    "what_is_frozen_changes_no_gradient": {
        "all are asked for": queries(
            halved, where=lambda q, k, v: q.requires_grad and k.requires_grad and v.requires_grad
        ),
        "queries are frozen": keys(halved, where=lambda q: not q.requires_grad),
    },
}
OF_SOFTMAX = {
    "amount_of_padding_does_not_matter": {"counted": unmasked(lambda: True)},
    "equals_softmax_attention": {"sharper": scaled(lambda: 1.001)},
    "equals_softmax_attention_at_every_scale": {
        "scales up to 10": scaled(lambda core: 10 / max(abs(core.problem.factor), 10))
    },
    "extreme_scores_stay_softmax": {"later blocks": weights(faults.powers_of_the_first_block)},
    "large_inputs_stay_finite": {"scores in float16": replaced("wide", lambda core, wide, x: x)},
    "long_sums_do_not_stall_in_half_precision": {
        "denominators in float16": weights(faults.float16_denominator)
    },
    "no_output_depends_on_a_later_token": {"causality is ignored": visible(torch.ones_like)},
    "weights_of_a_row_sum_to_one": {"denominators above one": weights(faults.clamped_denominator)},
}
OF_POSITIVE = {
    "a_saved_state_brings_the_output_back": {
        "features": replaced("keep", lambda core, keep, x: core.__dict__.update(directions=x.float()))
    },
    "a_seed_fixes_the_draw": {"large seeds": replaced("draw", lambda core, draw, seed: draw(seed % 2**31))},
    "batch_mates_do_not_matter": {"a seed of the batch": action(faults.seed_of_the_batch)},
    "later_values_move_no_output": {"largest future key": scores(faults.largest_future_key)},
    "more_features_come_nearer_to_softmax": {
        "rows of norm 1": replaced("draw", lambda core, draw, seed: draw(seed) / core.problem.head_dim**0.5),
        "a token reads itself alone": causal_reads(lambda row, key, ahead: key >= row + ahead),
    },
    "the_draw_has_no_preferred_direction": {"signs": replaced("draw", faults.draw_without_signs)},
    "the_size_matters": {"four features": with_options(num_features=4)},
}
OF_WINDOW = {"a_window_reads_its_neighbourhood": {"five keys": with_options(window=5)}}
LEARNED = {
    "a_copy_is_equal_and_apart": {"original": replaced("__deepcopy__", lambda core, *_: core)},
    "a_hundred_calls_leave_no_trace": {
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
        "beyond 4096 tokens": faults.mask_of_all_pairs(lambda q: q.shape[2] >= 4096),
        "in batches": faults.mask_of_all_pairs(lambda q: len(q) > 1 and q.shape[1] > 1),
    },
    "memory_grows_as_declared": {
        "a mask of all pairs": faults.mask_of_all_pairs(lambda q: True),
        "in training": flowing(lambda x: x + 0 * (x @ x.mT)[..., :1]),
    },
    "time_grows_as_declared": {"all pairs": output(faults.quadratic_time)},
}
# Shown by the long form alone.
LONG = {
    "every_sequence_is_its_single_call": {
        "65535 pairs": output(
            lambda x: x * (torch.arange(len(x) * x.shape[1]).view(len(x), -1, 1, 1) < 65_535)
        ),
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
    "ranks in their order": faults.ranks_in_their_order,
    "gradients times the ranks": faults.gradients_times_the_ranks,
}
# What `ea.Backend` does around every core, which no fault of a core can break; tests/mutants.tsv breaks it.
AROUND = {
    "autocast_changes_no_result",
    "calibration_is_an_explicit_act",
    "empty_inputs_give_empty_outputs",
    "no_keys_give_zeros",
    "what_is_not_promised_is_refused",
    "wrong_input_is_refused_by_name",
}
# A fault is caught by its numbers, except for these, which end in an error.
RAISING = {
    "a_copy_is_equal_and_apart-last output",
    "compiled_it_is_the_same-branch",
    "gradients_are_those_of_finite_differences-values",
    "modes_change_nothing-kept tensor",
    "second_derivatives_are_right_or_refused-groups",
}
# One of each kind runs at every test, all of them by hand.
QUICK = {
    "a_nan_shows_where_it_is_read-keys are cleaned",
    "amount_of_padding_does_not_matter-counted",
    "every_head_is_its_single_call-later heads are sharper",
    "later_values_move_no_output-largest future key",
    "order_of_queries_is_order_of_outputs-first row",
    "parts_of_any_size_are_the_whole-caller's buffers",
    "what_is_frozen_changes_no_gradient-all are asked for",
}
TABLES = (
    (("softmax", "kernel"), FAULTS),
    (("softmax",), OF_SOFTMAX),
    (("positive",), OF_POSITIVE),
    (("window",), OF_WINDOW),
    (("tempered",), LEARNED),
    (("linear-memory",), GROWING),
    (("softmax",), LONG),
)
CASES = [
    pytest.param(
        base, check, name, fault, id=f"{name}-{base}", marks=[pytest.mark.slow] * (name not in QUICK)
    )
    for bases, table in TABLES
    for base in bases
    for check, of_check in table.items()
    for name, fault in ((f"{check}-{short}", fault) for short, fault in of_check.items())
]


@pytest.fixture(autouse=True)
def settings_as_they_were():
    """Keep the settings that a fault leaves behind from later tests."""
    precision, softmax = torch.get_float32_matmul_precision(), nn.functional.softmax
    threads = torch.get_num_threads()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_flush_denormal(False)
    torch.set_default_dtype(F32)
    torch.set_num_threads(threads)
    nn.functional.softmax = softmax


def outcome(spec: BackendSpec, check: str, *, long: bool = False) -> tuple[str, bool, bool]:
    """The outcome, whether it fails, and whether the backend stumbles rather than gives wrong numbers."""
    (record,) = ea.check(spec, only=[check], on_fail="collect", long=long)
    return record.outcome, record.failed, "It raised" in record.detail


@pytest.mark.parametrize(("base", "check", "name", "fault"), CASES)
def test_a_fault_is_caught_by_the_check_of_its_promise(base: str, check: str, name: str, fault: type) -> None:
    control = BASES[base]
    core = type(f"Faulty{control.builder.__name__}", (fault, control.builder), {})
    long = name.removeprefix(f"{check}-") in LONG.get(check, {})
    broken = outcome(replace(control, name=core.__name__, builder=core), check, long=long)
    assert broken == ("broken", True, name in RAISING)


def test_second_derivatives_that_are_lost_in_silence_are_caught() -> None:
    lost = scores(lambda x: with_gradient(x, Tensor.detach))
    spec = _spec(type("Once", (lost, Softmax), {}), ONCE)
    assert outcome(spec, "second_derivatives_are_right_or_refused") == ("broken", True, False)


@pytest.mark.parametrize("exchange", EXCHANGED)
def test_a_wrong_exchange_between_ranks_is_caught(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXCHANGES, "wrong", Exchange(EXCHANGED[exchange]))
    spec = _spec(Softmax, replace(EXACT, sharded="wrong"))
    assert outcome(spec, "parts_on_several_ranks_are_the_whole") == ("broken", True, False)


def test_every_check_has_a_fault() -> None:
    ranks = "parts_on_several_ranks_are_the_whole"
    assert {check for _, table in TABLES for check in table} | {ranks} | AROUND == set(check_names(long=True))


@pytest.mark.parametrize(
    ("base", "check"), dict.fromkeys(case.values[:2] for case in CASES if case.values[2] in QUICK)
)
def test_what_has_no_fault_passes_the_quick_checks(base: str, check: str) -> None:
    assert outcome(BASES[base], check) == ("kept", False, False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("base", BASES)
def test_what_has_no_fault_passes_every_check(base: str, seed: int) -> None:
    names = [name for name in check_names() if name != "compiled_it_is_the_same"]
    ea.check(BASES[base], only=names, seed=seed)
