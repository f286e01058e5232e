"""Errors against exact softmax attention in float64, distances of models, and checks of outputs.

The baseline is uniform attention, the mean of the values for every query. An approximation with a larger
error carries no information about the keys that a query attends to.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.errors import DataError
from efficient_attn.shapes import Keys, Output, Queries, Values

# Scores are computed in blocks of rows, so that a long sequence never builds the whole float64 matrix.
ENTRIES_AT_ONCE = 1 << 23

# Positions of logits at once; exp of more nats leaves the range of floats.
_ROWS, _MOST_NATS = 64, 700.0

# Fewest rows of a sample, the share of all rows where that is more, and fewest rows of a head.
_FEWEST, _SHARE, _LEAST = 64, 0.01, 2

# A smaller deviation from uniform attention, over the exact output, is rounding of float32.
_DEVIATION = 1e-5

# Logits of a slice of positions, [positions vocabulary].
Logits: TypeAlias = Callable[[slice], Tensor]
Floats: TypeAlias = NDArray[np.float64]


def exact_output(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float,
    causal: bool = False,
    rows: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Output:
    """softmax(scale · q kᵀ) v in float64, in blocks of queries. A query without a visible key gives 0.

    Args:
        rows: Positions of the queries to compute, [rows]; None: all.
        key_mask: bool [batch k_tokens], True for a real token.
    """
    q, k, v = (x.to(torch.float32 if q.device.type == "mps" else torch.float64) for x in (q, k, v))
    positions, ahead = torch.arange(k.shape[-2], device=q.device), k.shape[-2] - q.shape[-2]
    rows = torch.arange(q.shape[-2], device=q.device) if rows is None else rows
    if key_mask is not None:
        k, v = (x.masked_fill(~key_mask[:, None, :, None], 0.0) for x in (k, v))
        key_mask = key_mask[:, None, None, :]
    parts = []
    for part in rows.split(max(1, ENTRIES_AT_ONCE // max(q.shape[0] * q.shape[1] * len(positions), 1))):
        visible = key_mask
        if causal:
            past = positions <= part[:, None] + ahead
            visible = past if key_mask is None else past & key_mask
        parts.append(
            F.scaled_dot_product_attention(
                q[..., part, :], k, v, attn_mask=visible, scale=scale, enable_gqa=True
            )
        )
    return torch.cat(parts, dim=-2)


@torch.no_grad()
def read_shares(backend: Backend, q: Queries, k: Keys, rows: Tensor | None = None) -> tuple[float, float]:
    """Share of visible keys that a backend reads, and of their exact softmax weight in float64."""
    tokens, ahead = k.shape[2], k.shape[2] - q.shape[2]
    rows = torch.arange(q.shape[2], device=q.device) if rows is None else rows
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    read_pairs, pairs, mass = 0, 0, 0.0
    for part in rows.split(max(1, ENTRIES_AT_ONCE // (q.shape[0] * q.shape[1] * tokens))):
        read = backend.keys_read(q, k, rows=part)
        scores = q[..., part, :].double() @ keys.mT * backend.problem.factor
        if backend.problem.causal:
            scores.masked_fill_(torch.arange(tokens, device=q.device) > part[:, None] + ahead, -torch.inf)
        mass += float(scores.softmax(dim=-1).masked_fill_(~read, 0.0).sum())
        read_pairs += int(read.count_nonzero())
        pairs += int(scores.isfinite().count_nonzero())
    return read_pairs / pairs, mass / (q.shape[0] * q.shape[1] * len(rows))


def mean_of_values(q: Queries, v: Values, *, causal: bool = False, key_mask: Tensor | None = None) -> Output:
    """Uniform attention: the mean of the visible values for every query."""
    # Sums of many values exceed the range of half precision.
    wide = v.to(torch.promote_types(v.dtype, torch.float32))
    wide = wide.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    seen = torch.ones_like(wide[:, :1, :, :1])
    if key_mask is not None:
        seen = key_mask[:, None, :, None].to(wide.dtype)
        wide = wide * seen
    if not causal:
        mean = wide.sum(dim=-2, keepdim=True) / seen.sum(dim=-2, keepdim=True).clamp_min(1)
        return mean.to(v.dtype).expand(*wide.shape[:2], q.shape[-2], v.shape[-1])
    mean = wide.cumsum(dim=-2) / seen.cumsum(dim=-2).clamp_min(1)
    return mean[..., v.shape[-2] - q.shape[-2] :, :].to(v.dtype)


def cosine_distance(x: Tensor, exact: Tensor) -> float:
    """1 − cos(x, exact), mean over rows, as |x/|x| − exact/|exact||² / 2: accurate near 0, never negative."""
    x, exact = (F.normalize(rows.double(), dim=-1) for rows in (x, exact))
    return float((x - exact).square().sum(dim=-1).mean() / 2)


def relative_error(x: Tensor, exact: Tensor) -> float:
    """‖x − exact‖ / ‖exact‖ over all entries."""
    wide = exact.double()
    return float((x.double() - wide).norm() / wide.norm())


class Deviations(NamedTuple):
    """Errors by direction and size, of all heads together and then of each head, float64 [1 + heads].

    E = out − uniform is the deviation of an output from uniform attention, D = exact − uniform the exact one.

    Attributes:
        errors: ‖out − exact‖ / ‖exact‖, with (error / U)² = 1 − 2cρ + ρ² and U = ‖D‖ / ‖exact‖.
        correlations: c = ⟨E, D⟩ / (‖E‖ ‖D‖), which no rescaling of E changes. NaN where E or D is rounding.
        ratios: ρ = ‖E‖ / ‖D‖, of which c is the best.
        rescaled_errors: U √(1 − c²), the error after the best rescaling of E.
    """

    errors: Tensor
    correlations: Tensor
    ratios: Tensor
    rescaled_errors: Tensor


def deviations(out: Output, exact: Output, uniform: Output) -> Deviations:
    """Deviations of float64 outputs [batch heads rows value_dim] from uniform attention."""
    ours, right = out - uniform, exact - uniform
    parts = (ours * right, ours.square(), right.square(), (out - exact).square(), exact.square())
    sums = torch.stack([part.sum(dim=(0, 2, 3)) for part in parts])
    products, *squares = torch.cat([sums.sum(dim=1, keepdim=True), sums], dim=1)
    ours, right, error, size = (x.sqrt() for x in squares)
    rounding = torch.minimum(ours, right) < _DEVIATION * size
    c = (products / (ours * right)).masked_fill(rounding, math.nan)
    return Deviations(error / size, c, ours / right, right / size * (1 - c.square()).clamp_min(0).sqrt())


class Sample(NamedTuple):
    """Squared norms of the error and of the exact output of some rows of one head, and its number of rows."""

    errors: Floats
    exact: Floats
    of: int


@torch.no_grad()
def sample_rows(
    backend: Backend, inputs: Sequence[Any], out: Tensor, *, rows: int | None, seed: int
) -> list[Sample]:
    """A sample of every head of every batch entry, of random rows.

    Args:
        inputs: q, k, v and the key mask of the call.
        rows: Number of rows in all; None: 64 or 1 % of all, whichever is more.
    """
    (q, k, v, key_mask), problem = inputs, backend.problem
    masks = [None] * len(q) if key_mask is None else list(key_mask)
    real = [_real_tokens(q.shape[2], mask, causal=problem.causal) for mask in masks]
    of, generator, samples = q.shape[1] * sum(map(len, real)), torch.Generator("cpu").manual_seed(seed), []
    count = max(_FEWEST, math.ceil(_SHARE * of)) if rows is None else rows
    for entry, (mask, tokens) in enumerate(zip(masks, real, strict=True)):
        # Rows of padding are drawn from the other entries, in proportion to their tokens.
        each = math.ceil(count * len(tokens) / max(of, 1))
        each = min(max(each, _LEAST), len(tokens))
        rows_out = out[entry, :, tokens.to(out.device)]
        if broken := int((~rows_out.isfinite()).any(dim=-1).sum()):
            raise DataError(
                f"{broken} rows of the output are not finite, whose error is no number; float32 inputs, "
                "or smaller ones, keep an output finite."
            )
        for head in range(q.shape[1] if each else 0):
            drawn = tokens[random_positions(len(tokens), each, generator)].to(q.device)
            key_head = head * k.shape[1] // q.shape[1]
            queries, keys, values = q[entry, head], k[entry, key_head], v[entry, key_head]
            exact = exact_output(
                *(x[None, None] for x in (queries, keys, values)),
                scale=problem.factor,
                causal=problem.causal,
                rows=drawn,
                key_mask=None if mask is None else mask[None],
            )[0, 0]
            errors = (out[entry, head, drawn] - exact).square().sum(dim=-1)
            norms = exact.square().sum(dim=-1)
            samples.append(Sample(errors.cpu().numpy(), norms.cpu().numpy(), len(tokens)))
    return samples


def _real_tokens(count: int, mask: Tensor | None, *, causal: bool) -> Tensor:
    if mask is None or not (causal or len(mask) == count):
        return torch.arange(count, device="cpu")
    return mask[len(mask) - count :].nonzero().squeeze(-1).cpu()


def random_positions(count: int, drawn: int, generator: torch.Generator) -> Tensor:
    """A random position in each of `drawn` equal parts. A position on a border belongs to both."""
    # On the CPU regardless of the default device, so that a seed gives the same rows everywhere.
    random = torch.rand(drawn, generator=generator, dtype=torch.float64, device="cpu")
    places = torch.arange(drawn, device="cpu") + random
    return (places * (count / drawn)).long().clamp_max_(count - 1)


class WrongOutputError(Exception):
    """Raised if a backend returns anything other than a valid output. Describes the returned value."""


@contextmanager
def outputs_checked(*modules: nn.Module) -> Iterator[None]:
    """Context that checks all outputs of the backends in the modules."""
    hooks = [part.register_forward_hook(check_call, with_kwargs=True) for part in backends_in(*modules)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def backends_in(*modules: nn.Module) -> list[Backend]:
    """All distinct backends in the modules."""
    backends = (part for module in modules for part in module.modules() if isinstance(part, Backend))
    return list(dict.fromkeys(backends))


def check_gradients(gradients: Mapping[str, Tensor | None]) -> None:
    """Refuse missing or non-finite gradients."""
    for name, gradient in gradients.items():
        if gradient is None:
            raise WrongOutputError(f"no gradient reached {name}.")
        if not _is_finite(gradient):
            raise WrongOutputError(f"{_share(gradient)} of the gradient of {name} are not finite.")


def check_call(backend: nn.Module, args: Sequence[Any], named: Mapping[str, Any], output: Any) -> None:
    """Refuse an output that is not finite or differs from q in shape, dtype or device."""
    arguments = dict(zip("qkv", args, strict=False)) | dict(named)
    q, k, v = (arguments[name].detach() for name in "qkv")
    shape = [*q.shape[:-1], v.shape[-1]]
    expected, came = f"a tensor {shape} of {q.dtype} on {q.device}", f"of type {type(output).__name__}"
    if isinstance(output, Tensor):
        came = f"a tensor {list(output.shape)} of {output.dtype} on {output.device}"
    if came != expected:
        raise WrongOutputError(f"the output is {came}; expected {expected}.")
    if not _is_finite(output) and all(map(_is_finite, (q, k, v))):
        raise WrongOutputError(f"{_share(output)} of the output are not finite, although q, k and v are.")


@torch.no_grad()
def _is_finite(x: Tensor) -> bool:
    # Minimum and maximum are finite only if all entries are; unlike x.isfinite() they take no memory.
    return not x.numel() or all(map(torch.isfinite, x.detach().aminmax()))


def _share(x: Tensor) -> str:
    broken = int((~x.detach().isfinite()).sum())
    return f"{broken} of {x.numel()} entries"


def next_token_distances(logits: Logits, exact: Logits, ids: Tensor) -> dict[str, float]:
    """Divergence in nats, perplexity and loss of the next token, in blocks of positions.

    The divergence is the mean of Σ p log(p / p'), p of `exact`, the loss that of log(p / p')(next token).
    Its standard error is over means of blocks of 64 tokens, since losses of near tokens are correlated.
    """
    kl = loss = 0.0
    differences: list[Tensor] = []
    for start in range(0, len(ids), _ROWS):
        rows = slice(start, min(start + _ROWS, len(ids)))
        log_q, log_p = (F.log_softmax(model(rows).double(), dim=-1) for model in (logits, exact))
        kl += float(F.kl_div(log_q, log_p, reduction="sum", log_target=True))
        following = ids[rows.start + 1 : rows.stop + 1]
        if len(following):
            places = torch.arange(len(following), device=ids.device), following
            loss -= float(log_q[places].sum())
            differences.append(log_p[places] - log_q[places])
    means = torch.stack([block.mean() for block in differences])
    return {
        # The divergence of equal distributions is zero, up to rounding of either sign.
        "next_token_kl": max(kl / len(ids), 0.0) if math.isfinite(kl) else kl,
        "loss_difference": float(torch.cat(differences).mean()),
        "loss_difference_error": float(means.std() / len(means) ** 0.5) if len(means) > 1 else 0.0,
        "perplexity": math.exp(min(loss / (len(ids) - 1), _MOST_NATS)) if math.isfinite(loss) else loss,
    }
