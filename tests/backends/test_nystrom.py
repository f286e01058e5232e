"""Nyströmformer against its paper: their segments, their iteration, and the limits of both."""

import pytest
import torch
from reference import random_qkv

import efficient_attn as ea


def published(q, k, v, *, landmarks, iterations=6, mask=None, norm_over=(-1,)):
    """Xiong et al. 2021 for tokens divisible by landmarks, with queries and keys scaled by head_dim^-1/4.

    Their code takes the norm of Z0 over all heads of the batch, or, on request, over each matrix alone.
    """
    batch, heads, tokens, dim = q.shape
    q, k = (x * (1.0 if mask is None else mask[:, None, :, None]) / dim**0.25 for x in (q, k))
    q_l, k_l = (x.reshape(batch, heads, landmarks, tokens // landmarks, dim).mean(dim=-2) for x in (q, k))
    unseen = torch.zeros(batch, tokens) if mask is None else torch.where(mask, 0.0, -torch.inf)
    kernels = [
        torch.softmax(scores, dim=-1)
        for scores in (q @ k_l.mT, q_l @ k_l.mT, q_l @ k.mT + unseen[:, None, None])
    ]
    middle, identity = kernels[1], torch.eye(landmarks, dtype=q.dtype)
    inverse = middle.mT / middle.sum(dim=-2, keepdim=True).amax(dim=norm_over, keepdim=True)
    for _ in range(iterations):
        both = middle @ inverse
        inverse = inverse @ (3.25 * identity - both @ (3.75 * identity - both @ (1.75 * identity - both / 4)))
    return kernels[0] @ inverse @ kernels[2] @ v


@pytest.mark.parametrize("iterations", [1, 6, 12])
def test_it_is_the_published_attention_where_segments_are_equal(iterations):
    q, k, v = random_qkv(2, 3, 3, 24, 24)
    backend = ea.build("nystrom", head_dim=8, landmarks=6, iterations=iterations)
    expected = published(q, k, v, landmarks=6, iterations=iterations)
    assert (backend(q, k, v) - expected).abs().max() <= 1e-12


def test_a_head_alone_has_the_published_norm_and_several_do_not_share_one():
    q, k, v = random_qkv(2, 3, 3, 24, 24)
    backend, whole = ea.build("nystrom", head_dim=8, landmarks=6), {"norm_over": (0, 1, -1), "landmarks": 6}
    alone = [x[1:, 2:] for x in (q, k, v)]
    assert (backend(*alone) - published(*alone, **whole)).abs().max() <= 1e-12
    assert (backend(q, k, v) - published(q, k, v, **whole)).abs().max() > 1e-5


def test_masked_tokens_shrink_no_landmark_as_they_do_in_the_published_code():
    q, k, v = random_qkv(1, 2, 2, 24, 24)
    mask = torch.arange(24)[None] < 20
    backend = ea.build("nystrom", head_dim=8, landmarks=4)
    short = [x[:, :, :20] for x in (q, k, v)]
    padded = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (q, k, v))
    out = backend(*padded, key_mask=mask)[:, :, :20]
    assert (out - published(*short, landmarks=4)).abs().max() <= 1e-12
    assert (out - published(q, k, v, landmarks=4, mask=mask)[:, :, :20]).abs().max() > 1e-3


def test_a_landmark_per_token_and_a_converged_inverse_are_exact_attention():
    q, k, v = random_qkv(2, 4, 2, 7, 7)
    mask = torch.tensor([[True] * 7, [True, False] * 3 + [True]])
    backend = ea.build("nystrom", head_dim=8, landmarks=9, iterations=30)
    difference = backend(q, k, v, key_mask=mask) - ea.attention(q, k, v, key_mask=mask)
    assert difference[0].abs().max() <= 1e-9 and difference[1, :, ::2].abs().max() <= 1e-9


@pytest.mark.slow
def test_more_iterations_leave_the_regularised_inverse_and_err_more():
    q, k, v = (x.double() for x in ea.sample(1)[:3])
    exact = ea.attention(q, k, v)
    errors = [
        ((ea.attention(q, k, v, "nystrom", iterations=steps) - exact).norm() / exact.norm()).item()
        for steps in (6, 20)
    ]
    assert errors == [pytest.approx(0.747, abs=1e-3), pytest.approx(4.402, abs=1e-3)]
