"""State of linear attention: a running sum over keys that merges, for every feature map.

Σ_j φ(q)·φ(k_j) v_j / Σ_j φ(q)·φ(k_j) depends on the keys only through the state Σ_j φ(k_j) [v_j, 1].
Two operations make states: `summarise` keys into a state, and `merge` states.
Features may be as large as exp(1000), so a state is stored relative to its largest key, feature by
feature, and a query adds that scale back before its own largest weight becomes one.

Full and causal attention share the backward pass. With p_tj the normalised weight of key j in row t and
δ_t = g_t·out_t, the gradient with respect to the unnormalised weight is (g_t·v_j − δ_t) / normaliser_t: the
product of [g_t, −δ_t] with [v_j, 1]. The same recurrence run over queries, with normalised query features and
[g, −δ] in place of [v, 1], gives the key and value gradients.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.dtypes import upcast
from efficient_attn.ops.grouped_queries import fold
from efficient_attn.ops.linear.features import Features
from efficient_attn.ops.paths import tuned_for_cpu

# Smaller exponents become −inf: products of two such weights would be denormal numbers, which are six to
# ten times slower and negligible.
LOWEST = {torch.float32: -42.0, torch.float64: -350.0}
# A row of a causal chunk whose weights all lie this far below the chunk's largest key is computed again, with
# a reference closer to its visible keys.
TINY = {torch.float32: 1e-8, torch.float64: 1e-100}
# Tokens per partial sum on a GPU, and the number of features from which on sums are partial.
_BLOCK, _MANY = 256, 1024


class LinearState(NamedTuple):
    """Sums over the past keys. States merge in any grouping.

    Attributes:
        sums: Σ_j φ(k_j) [v_j, 1] · exp(−log_scale), [batch kv_heads features value_dim+1].
        log_scale: Largest logarithmic scale of the keys, [batch kv_heads 1 features|1]; −inf: no key.
    """

    sums: Tensor
    log_scale: Tensor


class Means(NamedTuple):
    """The state of keys with positive features, as means of their values.

    Attributes:
        means: Σ_j φ(k_j) v_j / Σ_j φ(k_j), [batch kv_heads features value_dim]; 0: no key.
        log_sums: log Σ_j φ(k_j), [batch kv_heads 1 features]; −inf: no key.
    """

    means: Tensor
    log_sums: Tensor

    @classmethod
    def of(cls, state: LinearState) -> "Means":
        sums, ones = state.sums[..., :-1], state.sums[..., -1:]
        # Without a key the scale is −inf, and the logarithm of 1 has a finite gradient.
        ones = torch.where(ones > 0, ones, 1.0)
        return cls(sums / ones, state.log_scale + ones.mT.log())

    def to_sums(self) -> LinearState:
        return LinearState(with_ones(self.means), self.log_sums)


def summarise(keys: Features, v: Tensor, *, unscaled: bool) -> LinearState:
    """The state of keys and their values [batch kv_heads tokens value_dim]."""
    if unscaled and keys.values is not None:
        return LinearState(_summed(keys.values, with_ones(v)), keys.log_scale[..., :1, :])
    reference = keys.log_scale.detach().amax(dim=-2, keepdim=True)
    scale = exponential(keys.log_scale - finite(reference))
    if keys.values is None:
        return LinearState(scale.mT @ with_ones(v), reference)
    # The common scale of a token multiplies its value, which is shorter than its features.
    return LinearState(_summed(keys.values, with_ones(v) * scale), reference)


def _summed(features: Tensor, values: Tensor) -> Tensor:
    """featuresᵀ values. A GPU adds float32 products one after the other, which loses digits.

    The products of queries with many signed features cancel most of these sums. Blocks of tokens keep their
    digits: linear-taylor-2 at 4096 tokens errs by 2e-6 in place of 2e-5 on an H100.
    """
    few = features.shape[-1] < _MANY
    if few or tuned_for_cpu(features) or features.dtype is not torch.float32:
        return features.mT @ values
    padding = (0, 0, 0, -features.shape[-2] % _BLOCK)
    left, right = (F.pad(x, padding).unflatten(-2, (-1, _BLOCK)) for x in (features, values))
    return (left.mT @ right).sum(dim=-3)


def merge(left: LinearState, right: LinearState) -> LinearState:
    """The state after the tokens of both. Chunks may be merged in any grouping."""
    reference = torch.maximum(left.log_scale, right.log_scale)
    sums = [exponential(state.log_scale - finite(reference)).mT * state.sums for state in (left, right)]
    return LinearState(sums[0] + sums[1], reference)


def query_weights(queries: Features, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Weight of each feature of a state at `reference` in a query row, and its logarithmic scale.

    The largest weight of a positive row is 1, so that its denominator is at least 1 wherever
    every feature's largest key is visible. The scale of a signed row cancels and is omitted.
    """
    if queries.values is not None:
        return queries.values, reference
    exponents = queries.log_scale + reference
    top = exponents.detach().amax(dim=-1, keepdim=True)
    return exponential(exponents - finite(top)), top


def divide(sums: Tensor, total: Tensor, seen: Tensor | None) -> Tensor:
    """Numerators over the denominator, with zeros for fully masked rows, if there are any."""
    if seen is None:
        return sums[..., :-1] / total
    return torch.where(seen, sums[..., :-1] / torch.where(seen, total, 1.0), 0.0)


def log_sum(total: Tensor, reference: Tensor | float, seen: Tensor | None) -> Tensor:
    """Logarithm of the absolute denominators, +inf for fully masked rows, if there are any."""
    logarithm = reference + total.detach().abs().log()
    return logarithm if seen is None else logarithm.masked_fill(~seen, torch.inf)


def sees(state: LinearState) -> Tensor:
    """Whether the state has any key, bool [… 1 1]."""
    scaled = (state.log_scale != -torch.inf).any(dim=-1, keepdim=True)
    # Without scales the features of masked keys are 0.
    return scaled & (state.sums[..., -1:] != 0).any(dim=-2, keepdim=True)


def exponential(exponents: Tensor) -> Tensor:
    """exp, with results below `LOWEST` flushed to zero."""
    return F.threshold(exponents, LOWEST[exponents.dtype], -torch.inf).exp_()


def finite(reference: Tensor) -> Tensor:
    """The reference with 0 in place of −inf, so that it can be subtracted."""
    return reference.masked_fill(reference == -torch.inf, 0.0)


def with_ones(v: Tensor) -> Tensor:
    """Values with an extra column of ones, whose sum is the denominator."""
    return F.pad(v, (0, 1), value=1.0)


class CausalGradients(NamedTuple):
    """Gradients of causal attention after the keys of a state.

    Attributes:
        past_sums: For the sums of that state, [batch kv_heads features value_dim+1], or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    past_sums: Tensor | None


def read_gradients(
    keys: Features, values: Tensor, offset: Tensor, query_sums: Tensor, *, unscaled: bool
) -> tuple[Features, Tensor]:
    """Gradients of key features and of values, from sums over queries, [… features value_dim+1].

    Args:
        values: Values and ones, [… rows value_dim+1].
        offset: Logarithmic factor on the features, not read if `unscaled`.
    """
    if unscaled and keys.values is not None:
        grads = keys._replace(values=values @ query_sums.mT)
        return grads, keys.values @ query_sums[..., :-1]
    if keys.values is None:
        weights = exponential(keys.log_scale + offset)
        return Features(weights * (values @ query_sums.mT), None), weights @ query_sums[..., :-1]
    scale = exponential(keys.log_scale + offset)
    grad = (values * scale) @ query_sums.mT
    grad_log_scale = (keys.values * grad).sum(dim=-1, keepdim=True)
    return Features(grad_log_scale, grad), keys.values @ query_sums[..., :-1] * scale


def output_gradients(grad_out: Tensor, out: Tensor, part: slice, kv_heads: int) -> Tensor:
    """[g, −δ] of a chunk, [batch kv_heads group·part value_dim+1]."""
    g, out = (fold(upcast(x[..., part, :]), kv_heads) for x in (grad_out, out))
    return torch.cat([g, -(g * out).sum(dim=-1, keepdim=True)], dim=-1)


def keep_for_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Save the inputs, the output and each row's normaliser for the backward pass, but no features."""
    *tensors, ctx.kind, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)
    # Only the first output has a gradient; zero gradients of the others would be wasted.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
