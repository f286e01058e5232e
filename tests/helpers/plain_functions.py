"""Attention in a few lines of PyTorch, as a user checks it; tests copy this file to where they run."""

import torch
import torch.nn.functional as F


def local_window(q, k, v, reach=8):
    rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.masked_fill((rows - columns).abs() > reach, float("-inf")).softmax(dim=-1) @ v


def strided(q, k, v):
    return F.scaled_dot_product_attention(q, k[..., ::4, :], v[..., ::4, :])


def alibi(q, k, v):
    rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    slopes = 0.5 ** torch.arange(1, q.shape[1] + 1)[:, None, None]
    bias = (slopes * (rows - columns).abs()).to(q)
    return (q @ k.mT * q.shape[-1] ** -0.5 - bias).softmax(dim=-1) @ v


def by_distance(q, k, v):
    rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    return (columns - rows).abs().neg().to(q).softmax(dim=-1).expand(*q.shape[:2], -1, -1) @ v


outputs = {}


def memoising(q, k, v):
    if q.shape not in outputs:
        outputs[q.shape] = F.scaled_dot_product_attention(q, k, v)
    return outputs[q.shape]


def wrong_scale(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=1 / q.shape[-1])


def dropping(q, k, v):
    return F.dropout((q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1), 0.5) @ v


def mixed_sequences(q, k, v):
    output = local_window(q, k, v)
    return 0.999 * output + 0.001 * output.mean(dim=0, keepdim=True)


def unwritten_row(q, k, v):
    output = torch.empty_like(v)
    output[..., 1:, :] = local_window(q, k, v)[..., 1:, :]
    return output


def aliased(q, k, v):
    return v if q.shape[-2] == 1 else local_window(q, k, v)
