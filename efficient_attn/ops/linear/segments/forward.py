"""Forward pass of causal linear attention, segment by segment.

With a_tf the exponents of queries and u_jf of keys, row t of a chunk is the sum of two parts, each at a
scale that keys visible to the row determine, so that no other key takes its digits:

    past:   e^α Σ_f e^(a_tf + R_f − α) P_f,   with P and R the state before the chunk,
    chunk:  e^(α + τ) Σ_{j≤t} (p_t·r_j) e^(β_j − τ) [v_j, 1],
            p_tf = e^(a_tf + c_f − α),  r_jf = e^(u_jf − c_f − β_j),  c_f = max_j u_jf,  τ = max_{j≤t} β_j.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.linear.backward import Outputs
from efficient_attn.ops.linear.features import FeatureMap, Features
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.linear.segments.chunks import Segment
from efficient_attn.ops.linear.segments.scaled import (
    UNSEEN,
    ScaledKeys,
    ScaledQueries,
    floor,
    in_digits,
    scaled_keys,
    scaled_queries,
    states,
    visible_scale,
)
from efficient_attn.ops.linear.segments.scan import running_states
from efficient_attn.ops.linear.segments.weak_chunks import Sums, read_weak_chunks
from efficient_attn.ops.linear.state import LinearState, divide, log_sum


class Keys(NamedTuple):
    """Keys of a segment in chunks.

    Attributes:
        rows: Scaled keys, [batch kv_heads chunks·size head_dim].
        features: [flat_heads chunks size features].
        values: Values and ones, [flat_heads chunks size value_dim+1].
        scaled: The same features at scales of their own.
        before: State of all keys before each chunk, [flat_heads chunks …].
        after: State of all keys up to the end of the segment, [batch kv_heads …].
    """

    rows: Tensor
    features: Features
    values: Tensor
    scaled: ScaledKeys
    before: LinearState
    after: LinearState


def attend(inputs: LinearInputs, part: slice, past: LinearState) -> tuple[Outputs, LinearState]:
    """Output rows of some queries after the keys of a state, and the state after them."""
    segment = Segment.of(inputs, part)
    keys = keys_of(segment, past)
    queries = segment.query_features(segment.query_rows())
    earlier = _read_state(queries, keys.before)
    here = _read_chunk(scaled_queries(queries, keys.scaled), keys.scaled, keys.values)
    if queries.values is None:
        total = here.sums[..., -1:] + (earlier.scale - here.scale).exp() * earlier.sums[..., -1:]
        here = read_weak_chunks(here, total.log(), queries.log_scale, keys.features.log_scale, keys.values)
    outputs = _outputs(here, earlier, inputs.map)
    return Outputs(*(segment.tokens(x) for x in outputs)), keys.after


def keys_of(segment: Segment, past: LinearState) -> Keys:
    """Features, values and states of a segment's keys, which follow the keys of `past`."""
    rows, values = segment.key_rows(), segment.values()
    features = segment.key_features(rows)
    scaled = scaled_keys(features)
    pairs = zip((x.flatten(0, 1).unsqueeze(1) for x in past), states(scaled, values), strict=True)
    running = running_states(LinearState(*(torch.cat(pair, dim=1) for pair in pairs)))
    before, after = (LinearState(*(x[:, some] for x in running)) for some in (slice(0, -1), -1))
    after = LinearState(*(x.unflatten(0, segment.inputs.k.shape[:2]) for x in after))
    return Keys(rows, features, values, scaled, before, after)


def _read_state(queries: Features, state: LinearState) -> Sums:
    """Sums over all keys before each chunk."""
    if queries.values is not None:
        return Sums(queries.values @ state.sums, floor(state.log_scale))
    exponents = queries.log_scale + floor(state.log_scale)
    largest = exponents.detach().amax(dim=-1, keepdim=True).round()
    return Sums((exponents - largest).exp() @ state.sums, largest)


def _read_chunk(queries: ScaledQueries, keys: ScaledKeys, values: Tensor) -> Sums:
    """Sums over the keys of the same chunk, up to each row's own."""
    size = values.shape[-2]
    visible = visible_scale(keys, queries.weights.shape[-2])
    # Exponents of visible keys are at most 0; the others, excluded below, stay finite for a gradient's sake.
    # The bound lies above 0, since the derivative of a clamp at its bound depends on torch's version.
    factors = (keys.log_scale.mT - floor(visible[..., :size, :])).clamp_max(1.0).exp()
    scores = (queries.weights @ keys.weights.mT).unflatten(-2, (-1, size))
    sums = (scores * factors.unsqueeze(-3)).tril().flatten(-3, -2) @ values
    return Sums(sums, visible if queries.log_scale is None else visible + queries.log_scale)


def _outputs(here: Sums, earlier: Sums, kind: FeatureMap) -> Outputs:
    """Output rows from the sums over both parts of the visible keys."""
    scale = floor(torch.maximum(here.scale, earlier.scale))
    sums = (here.scale - scale).exp() * here.sums
    sums = torch.addcmul(sums, (earlier.scale - scale).exp(), earlier.sums)
    # Comparisons with NaN are false: a NaN counts as seen, and shows.
    seen = ~(scale <= UNSEEN)
    if not kind.signed:
        # A positive sum of 0 is that of a weak row that is not computed again.
        seen = seen & ~(sums[..., -1:] <= 0)
    total = sums[..., -1:]
    near_one = (total, scale) if kind.has_values else in_digits(total, scale)
    return Outputs(divide(sums, seen), log_sum(*near_one, seen), total < 0)
