"""Definitions of all methods with every weight in memory: the page to start with.

Each function is the formula of a backend in about ten lines. The modules beside it compute the same output
without the weights of all pairs, and tests compare them with this page.

Shapes are q [batch heads q_tokens head_dim], k [batch kv_heads k_tokens head_dim], v [batch kv_heads k_tokens
value_dim] and key_mask bool [batch k_tokens], True for a real token; equally many query heads share each key
head. Causal queries are the last positions of the keys. A query without a visible key has the output 0.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    key_mask: Tensor | None = None,
    window: int | None = None,
    global_tokens: int = 0,
) -> Tensor:
    """Σ_j softmax_j(s q_i·k_j) v_j over visible keys j (Vaswani et al. 2017, eq. 1).

    Args:
        window: Number of nearest keys that a query sees; causal: the last keys up to its own. None: all.
        global_tokens: Number of first real tokens that every query sees.
    """
    visible = visible_keys(q, k, causal=causal, key_mask=key_mask, window=window, global_tokens=global_tokens)
    return softmax_over(q, k, v, visible, scale=scale, key_mask=key_mask)


def softmax_over(
    q: Tensor, k: Tensor, v: Tensor, read: Tensor, *, scale: float, key_mask: Tensor | None = None
) -> Tensor:
    """Softmax attention over the keys that each query reads, bool [batch heads or 1, q_tokens k_tokens]."""
    scores = scale * (q @ for_query_heads(masked_to_zero(k, key_mask), q).mT)
    scores = scores.masked_fill(~read, -torch.inf)
    largest = scores.detach().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    return weighted_mean((scores - largest).exp(), masked_to_zero(v, key_mask))


def visible_keys(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    window: int | None = None,
    global_tokens: int = 0,
) -> Tensor:
    """Whether query i sees key j, bool [batch 1 q_tokens k_tokens]."""
    q_tokens, k_tokens = q.shape[2], k.shape[2]
    i = torch.arange(q_tokens, device=q.device)[:, None] + (k_tokens - q_tokens if causal else 0)
    j = torch.arange(k_tokens, device=q.device)
    real = torch.ones(len(k), k_tokens, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
    real = real[:, None, None]
    past = j <= i if causal else j >= 0
    if window is None:
        return past & real
    near = i - j < window if causal else (i - j).abs() <= window // 2
    return past & real & (near | (real.cumsum(dim=-1) <= global_tokens))


def top_keys(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    keys: int,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Visible keys with the `keys` largest scores, bool [batch heads q_tokens k_tokens] (`oracle-topk`)."""
    visible = visible_keys(q, k, causal=causal, key_mask=key_mask)
    scores = scale * (q @ for_query_heads(masked_to_zero(k, key_mask), q).mT)
    scores = scores.masked_fill(~visible, -torch.inf)
    return visible & (scores >= scores.sort(dim=-1, descending=True).values[..., :keys][..., -1:])


def bigbird_keys(
    k: Tensor,
    *,
    block: int,
    window: int,
    global_blocks: int,
    drawn: Tensor,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Keys of near, global and random blocks, bool [batch 1 tokens tokens] (Zaheer et al. 2020, section 2).

    Blocks are counted from the first real token. Queries are the same tokens.

    Args:
        drawn: Whether block i reads block j at random, bool [batch 1 blocks blocks].
    """
    real = k.new_ones(len(k), k.shape[2], dtype=torch.bool) if key_mask is None else key_mask
    position = torch.arange(k.shape[2]) - real.long().argmax(dim=1, keepdim=True)
    i, j = (position // block)[:, None, :, None], (position // block)[:, None, None]
    near = (i - j < window) if causal else (i - j).abs() <= window // 2
    everything = (j < global_blocks) | (torch.zeros_like(near) if causal else i < global_blocks)
    batch = torch.arange(len(k))[:, None, None, None]
    read = near | everything | drawn.expand(len(k), -1, -1, -1)[batch, 0, i.clamp_min(0), j.clamp_min(0)]
    past = position[:, None, :, None] >= position[:, None, None] if causal else torch.ones_like(near)
    return read & past & real[:, None, None] & (position >= 0)[:, None, :, None]


def block_topk_keys(
    q: Tensor, k: Tensor, *, scale: float, block: int, blocks: int, causal: bool = False
) -> Tensor:
    """Keys of near and of chosen blocks, bool [batch heads tokens tokens] (`block-topk`).

    Queries are the same tokens, all of them real. The mean query of a block selects keys, if causal for the
    next block, which also reads the first block and the block before.
    """
    mean_q, mean_k = (
        torch.stack([part.mean(dim=2) for part in x.split(block, dim=2)], dim=2)
        for x in (scale * q, for_query_heads(k, q))
    )
    b = torch.arange(mean_q.shape[2], device=q.device)
    i, j = b[:, None], b
    if causal:
        mean_q, near = mean_q.roll(1, dims=2), (i - j <= 1) | (j == 0)
        near, possible = near & (j <= i), ~near & (j <= i)
    else:
        near, possible = i == j, i != j
    scores = (mean_q @ mean_k.mT).masked_fill(~possible, -torch.inf)
    chosen = possible & (scores >= scores.sort(dim=-1, descending=True).values[..., :blocks][..., -1:])
    at = torch.arange(q.shape[2], device=q.device) // block
    return (near | chosen)[:, :, at][..., at] & visible_keys(q, k, causal=causal)


def weighted_mean(weights: Tensor, v: Tensor) -> Tensor:
    """Σ_j w_ij v_j / Σ_j w_ij, [batch heads q_tokens value_dim], with 0 for rows of zeros."""
    total = weights.sum(dim=-1, keepdim=True)
    return weights @ for_query_heads(v, weights) / total.masked_fill(total == 0, 1.0)


def for_query_heads(x: Tensor, q: Tensor) -> Tensor:
    """Rows of key heads, repeated for the query heads that share them, [batch heads tokens dim]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def masked_to_zero(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Keys or values with zeros in place of masked tokens, which may be NaN."""
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0.0)


def linformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mix_keys: Tensor,
    mix_values: Tensor,
    scale: float,
    key_mask: Tensor | None = None,
) -> Tensor:
    """softmax(s q (E k)ᵀ) F v (Wang et al. 2020, eq. 7).

    Mixture r of keys is divided by the share Σ_real |E_rj| / Σ_all |E_rj|. A mixture with a share of 0 of its
    keys or values takes no part.

    Args:
        mix_keys: E, [rank max_tokens] or [heads rank max_tokens]; mix_values, F, alike.
    """
    real = k.new_ones(len(k), 1, 1, k.shape[2]) if key_mask is None else key_mask[:, None, None].to(k)
    mixed, shares = [], []
    for mix, x in ((mix_keys, k), (mix_values, v)):
        of_real = mix[..., : k.shape[2]] * real
        shares.append(of_real.abs().sum(dim=-1) / mix.abs().sum(dim=-1))
        x = for_query_heads(masked_to_zero(x, key_mask), q)
        mixed.append(of_real @ x / shares[-1].masked_fill(shares[-1] == 0, 1.0).unsqueeze(-1))
    scores = (scale * q @ mixed[0].mT).masked_fill((shares[0] * shares[1] == 0).unsqueeze(-2), -torch.inf)
    return scores.softmax(dim=-1).nan_to_num(0.0) @ mixed[1]


def nystrom(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    landmarks: int,
    iterations: int,
    scale: float,
    key_mask: Tensor | None = None,
) -> Tensor:
    """softmax(s q k̃ᵀ) A⁺ softmax(s q̃ kᵀ) v with A = softmax(s q̃ k̃ᵀ) (Xiong et al. 2021, eq. 13).

    A landmark, of q̃ or k̃, is the mean of a segment of real tokens.
    """
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    visible = q.new_ones(len(q), q.shape[2]).bool() if key_mask is None else key_mask
    for entry in visible.any(dim=1).nonzero().flatten().tolist():
        real = visible[entry].nonzero().flatten()
        segment = torch.arange(len(real), device=q.device) * min(landmarks, len(real)) // len(real)
        parts = [real[segment == index] for index in segment.unique()]
        queries, keys, values = q[entry], *(for_query_heads(x[[entry]], q)[0] for x in (k, v))
        few_q, few_k = (torch.stack([x[:, j].mean(dim=1) for j in parts], dim=1) for x in (queries, keys))
        first = (scale * queries @ few_k.mT).softmax(dim=-1)
        last = (scale * few_q @ keys[:, real].mT).softmax(dim=-1)
        inverse = pseudo_inverse((scale * few_q @ few_k.mT).softmax(dim=-1), iterations)
        out[entry] = first @ inverse @ last @ values[:, real]
    return out


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """Z ← ¼ Z (13 I − A Z (15 I − A Z (7 I − A Z))) from Aᵀ / (‖A‖₁ ‖A‖∞) (eq. 11 and 12), per matrix."""
    norms = [torch.linalg.matrix_norm(a, order, keepdim=True) for order in (1, torch.inf)]
    z, identity = a.mT / (norms[0] * norms[1]), torch.eye(a.shape[-1]).to(a)
    for _ in range(iterations):
        z = z @ (13 * identity - a @ z @ (15 * identity - a @ z @ (7 * identity - a @ z))) / 4
    return z


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Callable[[Tensor], Tensor],
    *,
    scale: float,
    causal: bool = False,
    key_mask: Tensor | None = None,
    key_features: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Σ_j φ(x_i)·φ(y_j) v_j / Σ_j φ(x_i)·φ(y_j), x = √s q, y = √s k (Choromanski et al. 2021, section 2.2).

    Args:
        features: φ of rows [… tokens head_dim], [… tokens features].
        key_features: φ of keys; None: `features`.
        scale: s, whose sign only queries carry.
    """
    root = math.sqrt(abs(scale))
    x, y = math.copysign(root, scale) * q, root * for_query_heads(masked_to_zero(k, key_mask), q)
    weights = features(x) @ (key_features or features)(y).mT
    visible = visible_keys(q, k, causal=causal, key_mask=key_mask)
    return weighted_mean(weights.masked_fill(~visible, 0.0), masked_to_zero(v, key_mask))


def positive_features(x: Tensor, w: Tensor) -> Tensor:
    """exp(w·x − |x|²/2) / √m for m directions w (FAVOR+, Choromanski et al. 2021, lemma 1)."""
    return (x @ w.mT - square(x) / 2).exp() / math.sqrt(len(w))


def hyperbolic_features(x: Tensor, w: Tensor) -> Tensor:
    """[exp(w·x), exp(−w·x)] exp(−|x|²/2) / √2m (Choromanski et al. 2021, lemma 1)."""
    return torch.cat([positive_features(x, w), positive_features(x, -w)], dim=-1) / math.sqrt(2)


def trigonometric_features(x: Tensor, w: Tensor) -> Tensor:
    """[cos(w·x), sin(w·x)] exp(|x|²/2) / √m (Choromanski et al. 2021, eq. 4)."""
    angles = x @ w.mT
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * (square(x) / 2).exp() / math.sqrt(len(w))


def dense_exponential_features(x: Tensor, w: Tensor, a: Tensor) -> Tensor:
    """Π_l (1 − 4a_l)^¼ exp(Σ_l a_l w_l² + Σ_l √(1 − 4a_l) w_l x_l − |x|²/2) / √m.

    All a_l are equal in `performer-oprf` (Likhosherstov et al. 2022), but not in `performer-full` (2023).
    """
    rest = 1 - 4 * a
    exponents = w.square() @ a + (x * rest.sqrt()) @ w.mT - square(x) / 2
    return rest.prod() ** 0.25 * exponents.exp() / math.sqrt(len(w))


def relu_features(x: Tensor, w: Tensor) -> Tensor:
    """max(w·x, 0) / √m + 0.001 (Choromanski et al. 2021, Performer-ReLU)."""
    return (x @ w.mT).relu() / math.sqrt(len(w)) + 1e-3


def elu_features(x: Tensor) -> Tensor:
    """elu(x) + 1 (Katharopoulos et al. 2020, eq. 7)."""
    return torch.where(x > 0, x + 1, x.exp())


def taylor_features(x: Tensor, order: int) -> Tensor:
    """[1, x], whose products are 1 + x·y, and for order 2 also xxᵀ/√2, for 1 + x·y + (x·y)²/2."""
    terms = [torch.ones_like(x[..., :1]), x]
    if order == 2:
        terms.append((x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) / math.sqrt(2))
    return torch.cat(terms, dim=-1)


def hedgehog_features(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[softmax(Wx + b), softmax(−Wx − b)] (Zhang et al. 2024, section 4.2, eq. 6)."""
    y = x @ weight.mT + bias
    return torch.cat([y.softmax(dim=-1), (-y).softmax(dim=-1)], dim=-1)


def square(x: Tensor) -> Tensor:
    """|x|², [… tokens 1]."""
    return x.square().sum(dim=-1, keepdim=True)


def clustered_softmax(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, near: Tensor, cluster: Tensor
) -> Tensor:
    """Softmax of a head over near keys and one summary per cluster of far keys (`window-clusters`).

    With x = s q, their mean m and variance σ², w_j = e^{m·k_j} and means k̄_c, v̄_c under these weights, the
    score of cluster c is x·k̄_c + log Σ_j w_j − m·k̄_c + log(1 + a_c + a_c²/2), a_c = ½ Σ_d σ_d² Var_c k_d.

    Args:
        q: [tokens head_dim]; k and v alike.
        near: Whether query i reads key j by itself, bool [tokens tokens].
        cluster: Cluster of each key, [tokens].
    """
    x = scale * q
    m, variance = x.mean(dim=0), x.var(dim=0, correction=0)
    members = cluster == torch.arange(int(cluster.max()) + 1)[:, None]
    w = (members & ~near[:, None]) * (k @ m).exp()  # [tokens clusters tokens]
    empty = ~w.any(dim=-1)
    mass = w.sum(dim=-1).masked_fill(empty, 1.0)
    mean_k, mean_v, mean_square = (w @ y / mass[..., None] for y in (k, v, k.square()))
    a = (mean_square - mean_k.square()) @ variance / 2
    far = ((x - m).unsqueeze(1) * mean_k).sum(dim=-1) + mass.log() + (1 + a + a**2 / 2).log()
    scores = torch.cat([(x @ k.mT).masked_fill(~near, -torch.inf), far.masked_fill(empty, -torch.inf)], dim=1)
    weights = scores.softmax(dim=-1)
    return weights[:, : len(k)] @ v + (weights[:, len(k) :, None] * mean_v).sum(dim=1)
