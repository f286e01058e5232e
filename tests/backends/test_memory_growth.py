"""Peak memory of a call is affine in the number of tokens, and what grows is what the caller gets.

Beside it there are a few numbers for each row: log-sum-exps, signs, the slopes of a backward pass.
"""

import numpy as np
import pytest
import torch

import efficient_attn as ea
from efficient_attn.measure import memory

HEADS, DIM, FLOAT, MIB = 8, 64, 4, 2**20
# Log-sum-exps as the kernel orders them and as they are kept, and a sign of one byte for each.
ROW_NUMBERS = 2.5
LENGTHS = (2048, 4096, 16384, 65536)
# Standard deviation of queries and keys, and the limit of the constant part of the peak. From the first
# large exponent on, which Gaussian inputs of deviation 1 reach in a few draws of the longest length, causal
# features are relative to running maxima, kept for every feature, and chunks are held once more: 2.6 MiB.
SMALL, LARGE = 0.5, 4.0
CONSTANT = {SMALL: 4 * MIB, LARGE: 6 * MIB}
BACKENDS = [
    ("performer-positive", {"num_features": 256}, False, SMALL),
    ("performer-positive", {"num_features": 256}, True, SMALL),
    ("performer-positive", {"num_features": 256}, True, LARGE),
    ("performer-trig", {"num_features": 256}, False, SMALL),
    ("window", {"window": 257}, False, SMALL),
    ("window", {"window": 129}, True, SMALL),
    ("linformer", {"rank": 256}, False, SMALL),
]


def peak(name, options, tokens, *, causal, deviation, backward):
    """Bytes of one call, and how many of them the caller gets: the output and every gradient."""
    most = {"max_tokens": tokens} if name == "linformer" else {}
    attend = ea.build(name, head_dim=DIM, num_heads=HEADS, causal=causal, **most, **options)
    draw = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, HEADS, tokens, DIM, generator=draw) for _ in range(4))
    q, k = q * deviation, k * deviation
    wanted = [x.requires_grad_(backward) for x in (q, k, v)]
    if backward:
        wanted += attend.parameters()

    def call():
        with torch.set_grad_enabled(backward):
            out = attend(q, k, v)
            return torch.autograd.grad(out, wanted, g) if backward else out

    return memory.peak(call, device="cpu").peak_bytes, FLOAT * (
        g.numel() + backward * sum(map(torch.numel, wanted))
    )


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "and-backward"])
@pytest.mark.parametrize(("name", "options", "causal", "deviation"), BACKENDS, ids=lambda x: str(x))
def test_peak_is_affine_in_the_tokens(name, options, causal, deviation, backward):
    setting = {"causal": causal, "deviation": deviation, "backward": backward}
    peak(name, options, LENGTHS[0], **setting)
    peaks, given = np.transpose([peak(name, options, tokens, **setting) for tokens in LENGTHS])
    design = np.stack([np.ones(len(LENGTHS)), np.array(LENGTHS)], axis=1)
    # Relative residuals: what is asked is at most one percent anywhere.
    (constant, slope), *_ = np.linalg.lstsq(design / peaks[:, None], np.ones(len(LENGTHS)), rcond=None)
    assert np.abs(design @ (constant, slope) / peaks - 1).max() <= 0.01
    grows = given[-1] / LENGTHS[-1]
    assert 0.99 * grows <= slope <= 1.01 * (grows + ROW_NUMBERS * FLOAT * HEADS)
    assert constant <= CONSTANT[deviation]
