"""Faults of outputs by check, which differ in the input that shows them, and faults of other bases."""

import math
from collections.abc import Callable
from dataclasses import replace

import fault_steps as at
import torch
from base_cores import with_gradient
from fault_steps import BF16, F16, F32, F64
from torch import Tensor

from efficient_attn.distributed.keys import attend_keys


def row_of(x: Tensor) -> float:
    """The factor of a row that is off, where there are many."""
    return 1.001 if x.shape[2] > 9 else 1.0


def with_options(**options: int) -> type:
    return at.replaced("__init__", lambda core, init, problem, old: init(problem, replace(old, **options)))


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


def mask_of_all_pairs(where: Callable[[Tensor], bool]) -> type:
    """Quadratic memory, where the queries are such."""
    return at.output(
        lambda x, q, k: x * torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)[:, :1] if where(q) else x
    )


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


def ranks_in_their_order(backend, q, k, v, mask, layout):
    """Right for contiguous segments, wrong for a head-tail layout."""
    return attend_keys(backend, q, k, v, mask, layout._replace(kind="contiguous"))


def gradients_times_the_ranks(backend, q, k, v, mask, layout):
    """The output is right; every rank sums the gradients of all, and the sums are summed again."""
    k, v = (x + (layout.ranks - 1) * (x - x.detach()) for x in (k, v))
    return attend_keys(backend, q, k, v, mask, layout)


# Each check with its faults.
FAULTS = {
    "a_nan_shows_where_it_is_read": {
        "keys are cleaned": at.keys(torch.nan_to_num),
        "queries are cleaned": at.queries(torch.nan_to_num),
        "gradients are cleaned": at.flowing(torch.nan_to_num),
        "negative infinity is cleaned": at.values(lambda v: v.masked_fill(v == -torch.inf, 0.0)),
    },
    "a_negative_scale_negates_queries": {
        "beyond 128 keys": at.scaled(
            lambda core, k: -1 if core.problem.factor < 0 and k.shape[2] > 128 else 1
        ),
        "64 entries": at.scaled(lambda core, q: -1 if core.problem.factor < 0 and q.shape[3] == 64 else 1),
    },
    "a_prefix_is_a_sequence_of_its_own": {"temperature": at.scaled(lambda k: 1 + 1e-3 * k.shape[2])},
    "a_query_alone_is_its_row": {
        "first row": at.output(lambda x: torch.cat([x[:, :, :1] * row_of(x), x[:, :, 1:]], 2)),
        "last row": at.output(lambda x: torch.cat([x[:, :, :-1], x[:, :, -1:] * row_of(x)], 2)),
        "second block": at.causal_reads(lambda row, key, ahead: (key <= row) | (row < 512)),
    },
    "fully_masked_rows_give_zeros": {
        "wide": at.output(
            lambda x, q, mask: x if mask is None or q.shape[3] < 64 else x + ~mask.any(1)[:, None, None, None]
        )
    },
    "columns_of_values_are_computed_alone": {
        "columns of values set the scale": at.queries(lambda q, v: q * (q.shape[3] / v.shape[3]) ** 0.5),
        "columns beyond 256 are zero": at.output(lambda x: x * (torch.arange(x.shape[3]) < 256)),
        "last tile": at.output(lambda x: x * (torch.arange(x.shape[3]) < 64) if x.shape[3] == 96 else x),
        "wide values": at.output(lambda x, q: x * 1.02 if x.shape[3] > q.shape[3] == 64 else x),
    },
    "every_column_is_read": {
        "first 256": at.queries(lambda q: q * (torch.arange(q.shape[3]) < 256)),
        "last tile": at.keys(lambda k: k * (torch.arange(k.shape[3]) < 64) if k.shape[3] == 80 else k),
    },
    "every_head_is_its_single_call": {
        "wide groups in turn": at.groups_in_turn(lambda x: x.shape[3] >= 64),
        "later heads are sharper": at.scores(lambda x: torch.cat([x[:, :4], x[:, 4:] * 1.01], 1)),
        "groups of twelve in turn": at.groups_in_turn(lambda x, heads: heads // x.shape[1] > 8),
        "whole tiles": at.output(
            lambda x: x * (torch.arange(x.shape[1]) < max(x.shape[1] // 64 * 64, 64))[:, None, None]
        ),
        "12": at.scores(lambda x: x * 1.02 if x.shape[1] == 12 else x),
        "64": at.first_keys(lambda q, keys: keys - 1 if q.shape[1] == 64 and keys % 2 and keys > 1 else keys),
    },
    "every_sequence_is_its_single_call": {
        "wide masks of three": at.unmasked(lambda q: len(q) > 2 and q.shape[3] >= 64),
        "third": at.keys(lambda k: torch.cat([k[:2], k[1:2].expand_as(k[2:])]), where=lambda k: len(k) > 2),
        "eight": at.scaled(lambda q: 1.02 if len(q) == 8 else 1.0),
        "16 masks": at.masks(
            lambda mask: torch.cat([mask[:16], mask[: len(mask) - 16]]), where=lambda mask: len(mask) > 16
        ),
    },
    "float32_is_float32_throughout": {
        "weights of many keys": at.weights(lambda x: at.narrowed(F32, BF16)(x) if x.shape[3] > 128 else x),
    },
    "float64_is_float64_throughout": {
        "scores": at.scores(lambda x: with_gradient(x, at.narrowed(F64, F32))),
    },
    "grouped_queries_are_repeated_heads": {
        "three groups in turn": at.groups_in_turn(lambda x: x.shape[1] == 3),
        "one key in turn": at.groups_in_turn(lambda x: x.shape[2] == 1),
        "16 heads in turn": at.groups_in_turn(lambda x, heads: heads == 16 and x.shape[1] > 1),
    },
    "half_precision_has_no_bias": {
        "long queries": at.queries(lambda q: q * 1.02, where=lambda q: q.dtype == BF16),
        "long keys": at.keys(lambda k: k * 1.02, where=lambda k: k.dtype == F16),
        "scale": at.scaled(
            lambda q, core: float(torch.tensor(core.problem.factor, dtype=q.dtype)) / core.problem.factor
        ),
    },
    "inputs_are_not_written_to": {
        "long keys": at.action(lambda k: k.shape[2] <= 128 or k.detach().add_(1.0)),
        "masks": at.action(lambda mask: mask is None or mask[:, -1:].fill_(True)),
        "padding": at.action(lambda v, mask: mask is None or v.data.nan_to_num_()),
        "gradient asked for": at.action(
            lambda q: q.is_leaf and torch.is_grad_enabled() and q.requires_grad_()
        ),
    },
    "large_values_stay_proportional": {
        "normalised last": at.output(lambda x: x * 130 / 130 if x.dtype == F16 else x),
        "divided in float16": at.values(lambda v: v / 8 * 8 if v.dtype == F16 else v),
        "flushed": at.values(lambda v: v.where(v.abs() > 1e-12, 0.0)),
        "states in float16": at.states(lambda k, v, mask: (k, at.narrowed(BF16, F16)(v), mask)),
    },
    "layout_in_memory_does_not_matter": {
        "column": at.masks(lambda mask: None, where=lambda mask: mask.shape[1] > 1 and not mask.stride(1)),
        "shared prefix": at.masks(
            lambda mask: mask[:1].expand_as(mask),
            where=lambda k, v: k.stride(0) == v.stride(0) == 0 < k.stride(1),
        ),
        "shared key": at.queries(lambda q: q[:1].expand_as(q), where=lambda k: k.stride(0) == 0),
        "turned twice": at.keys(lambda k: k * 2, where=lambda q, k: q.data_ptr() == k.data_ptr()),
        "start of memory": at.values(
            lambda v: v.as_strided(v.shape, v.stride(), 0), where=lambda v: not v.is_contiguous()
        ),
        "extended": at.new_keys(lambda k: k * 2, where=lambda k: k.stride(3) != 1),
        "shared head": at.values(lambda v: v * 2, where=lambda v: v.stride(1) == 0 < v.stride(0)),
    },
    "masked_keys_leave_no_gap": {
        "causal window": at.causal_reads(lambda row, key, ahead: row + ahead - key < 256),
        "cross attention": at.unmasked(lambda q, k: q.shape[2] != k.shape[2]),
        "128 entries": at.unmasked(lambda q: q.shape[3] == 128),
    },
    "narrow_dtypes_lose_only_rounding": {
        "bfloat16": at.values(lambda v: v * 1.1 if v.dtype == BF16 else v),
        "another dtype": at.output(lambda x: x.float() if x.dtype == BF16 else x),
        "wide": at.queries(at.narrowed(F32, BF16), where=lambda q: q.shape[3] >= 64),
    },
    "order_of_keys_does_not_matter": {
        "square keys are turned": at.keys(lambda k: k.mT, where=lambda k: k.shape[2] == k.shape[3]),
        "equal keys": at.visible(equal_keys_once),
        "half a tile": at.first_keys(lambda keys: keys - 64 * (keys > 128 and keys % 128 == 64)),
        "short last tile": at.first_keys(
            lambda keys: keys // 1024 * 1024 if keys > 1024 and keys % 1024 < 8 else keys
        ),
    },
    "outputs_are_linear_in_the_values": {"squares of values": at.values(lambda v: v + 1e-3 * v * v)},
    "padding_contents_change_no_bit": {
        "long masks": at.before("hidden", "mask")(lambda: None, where=lambda x: x.shape[2] > 128)
    },
    "padding_on_either_side_does_not_matter": {
        "halves": at.output(halves_without_their_sums),
        "last key": at.masks(
            lambda mask: mask & (torch.arange(mask.shape[1]) < mask.shape[1] - 1),
            where=lambda mask: mask.shape[1] > 1 and mask.all(),
        ),
    },
    "scale_is_a_factor_on_the_scores": {
        "below one": at.scaled(lambda core: 1 / max(abs(core.problem.factor), 1.0)),
        "64": at.scaled(lambda core, q: 1.0 if core.problem.scale else (max(q.shape[3], 64) / 64) ** 0.5),
        "long keys": at.keys(
            lambda k: k * (30 / k.norm(dim=-1, keepdim=True).clamp_min(1e-9)).clamp_max(1.0)
        ),
        "half": at.scaled(lambda core, q: at.default_ratio(core) if q.dtype in (BF16, F16) else 1.0),
        "zero": at.scores(lambda x, q, k, core: x if core.problem.factor else core.wide(q) @ core.wide(k).mT),
        "single queries": at.scaled(lambda core, q: at.default_ratio(core) if q.shape[2] == 1 else 1.0),
    },
    "usual_sizes_are_no_exception": {
        "64 entries": at.scaled(lambda q, core: 1 / core.problem.factor if q.shape[3] == 64 else 1.0),
        "inference": at.scaled(
            lambda q: 1.01 if q.shape[3] == 96 and torch.is_inference_mode_enabled() else 1.0
        ),
        "1024 keys": at.scaled(lambda k: 1.01 if k.shape[2] == 1024 else 1.0),
        "whole tiles": at.scaled(lambda k: 1.01 if k.shape[2] % 128 == 0 else 1.0),
    },
    "weights_are_never_negative": {"small weights": at.weights(lambda x: 1.1 * x - 0.1 / x.shape[3])},
    "weights_of_a_row_sum_to_one": {"an epsilon is added": at.weights(lambda x: x / (1 + 1e-8))},
}
OF_SOFTMAX = {
    "padding_on_either_side_does_not_matter": {"counted": at.unmasked(lambda: True)},
    "equals_softmax_attention": {
        "sharper": at.scaled(lambda: 1.001),
        "clamped": at.scores(lambda x: x.clamp(-80, 80)),
        "64 entries": at.scaled(lambda q, core: 1 / core.problem.factor if q.shape[3] == 64 else 1.0),
        "12 heads": at.scores(lambda x: x * 1.02 if x.shape[1] == 12 else x),
        "1024 keys": at.scaled(lambda k: 1.01 if k.shape[2] == 1024 else 1.0),
    },
    "equals_softmax_attention_at_every_scale": {
        "scales up to 10": at.scaled(lambda core: 10 / max(abs(core.problem.factor), 10))
    },
    "large_values_stay_proportional": {"scores in float16": at.replaced("wide", lambda core, wide, x: x)},
    "long_sums_do_not_stall_in_half_precision": {"denominators in float16": at.weights(float16_denominator)},
    "later_values_move_no_output": {"causality is ignored": at.visible(torch.ones_like)},
    "weights_of_a_row_sum_to_one": {
        "denominators above one": at.weights(
            lambda x, logits: x * logits.exp().sum(-1, keepdim=True).clamp_max(1.0)
        )
    },
}
OF_POSITIVE = {
    "a_saved_state_brings_the_output_back": {
        "features": at.replaced("keep", lambda core, keep, x: core.__dict__.update(directions=x.float()))
    },
    "a_seed_fixes_the_draw": {
        "large seeds": at.replaced("draw", lambda core, draw, seed: draw(seed % 2**31))
    },
    "every_sequence_is_its_single_call": {"a seed of the batch": at.action(seed_of_the_batch)},
    "later_values_move_no_output": {"largest future key": at.scores(largest_future_key)},
    "more_features_come_nearer_to_softmax": {
        "rows of norm 1": at.replaced(
            "draw", lambda core, draw, seed: draw(seed) / core.problem.head_dim**0.5
        ),
        "a token reads itself alone": at.causal_reads(lambda row, key, ahead: key >= row + ahead),
    },
    "the_draw_has_no_preferred_direction": {"signs": at.replaced("draw", draw_without_signs)},
    "the_size_matters": {"four features": with_options(num_features=4)},
}
OF_WINDOW = {"a_window_reads_its_neighbourhood": {"five keys": with_options(window=5)}}
LEARNED = {
    "a_saved_state_brings_the_output_back": {"original": at.replaced("__deepcopy__", lambda core, *_: core)},
    "no_state_between_calls": {
        "first factor": at.scores(
            lambda x, core: x / core.factor * core.__dict__.setdefault("first", core.factor.detach().clone())
        )
    },
    "gradients_hold_at_every_shape": {
        "factor": at.scores(lambda x, core: x / core.factor * core.factor.detach())
    },
}
GROWING = {
    "memory_grows_as_declared": {
        "beyond 4096 tokens": mask_of_all_pairs(lambda q: q.shape[2] >= 4096),
        "in batches": mask_of_all_pairs(lambda q: len(q) > 1 and q.shape[1] > 1),
        "in training": at.flowing(lambda x: x + 0 * (x @ x.mT)[..., :1]),
    },
    # Exact attention takes the time of all pairs.
    "time_grows_as_declared": {"nothing else": at.output(lambda x: x)},
}
OF_ALONE = {
    "bits_do_not_depend_on_the_batch": {
        "seven": at.output(lambda x: x * (1 + 2e-7) if len(x) > 2 else x),
        "one on two threads": at.output(
            lambda x: x * (1 + 2e-7) if len(x) == 1 and torch.get_num_threads() == 2 else x
        ),
    }
}
# Shown by the long form alone.
LONG = {
    "every_sequence_is_its_single_call": {
        "pairs": at.output(lambda x: x * (torch.arange(len(x) * x.shape[1]).view(len(x), -1, 1, 1) < 65_535)),
        "large inputs": at.queries(at.narrowed(F32, BF16), where=lambda q: q.numel() >= 2**20),
    },
    "later_values_move_no_output": {"rows beyond 3000 leak": at.causal_leak(3000, 1)},
    "long_states_are_whole": {"one row in 128 leaks": at.causal_leak(2047, 128)},
    "order_of_keys_does_not_matter": {
        "blocks of 4096": at.first_keys(lambda keys: keys // 4096 * 4096 if keys > 4096 else keys),
        "16 bits": at.first_keys(lambda keys: min(keys, 2**15)),
    },
    "very_long_states_are_whole": {"8192 tokens": at.ring(8192)},
}
EXCHANGED = {
    "own rank alone": lambda backend, q, k, v, mask, layout: backend.core(q, k, v, mask),
    "ranks in their order": ranks_in_their_order,
    "gradients times the ranks": gradients_times_the_ranks,
}
