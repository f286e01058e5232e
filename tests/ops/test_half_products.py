"""Products in half precision on the path of a GPU, taken on the CPU."""

from functools import partial

import pytest
import torch

import efficient_attn as ea
from efficient_attn.measure.memory import peak
from efficient_attn.ops import naive, paths
from efficient_attn.ops.linformer import linformer_attention
from efficient_attn.ops.softmax import fused
from efficient_attn.ops.window import unfused


@pytest.fixture
def gpu(monkeypatch):
    """The path of a GPU: operators alone, and no product of half precision in float32."""
    monkeypatch.setenv(paths.VARIABLE, "torch")
    monkeypatch.setattr(paths, "UPCAST", set())


def with_gradients(call, inputs, upstream):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = call(*leaves)
    return [out, *torch.autograd.grad(out, leaves, upstream.to(out))]


def root_mean_square(actual, expected):
    return (actual.double() - expected).square().mean().sqrt()


def rounded_weights(scores, v):
    """Softmax in float32 and weights in the dtype of v, as plain attention in half precision has them."""
    return scores.float().softmax(dim=-1).to(v.dtype) @ v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [1, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_the_unfused_window_errs_at_most_twice_as_much_as_plain_attention(gpu, causal, norm, dtype):
    def plain(q, k, v):
        distance = torch.arange(300) - torch.arange(300)[:, None]
        hidden = (distance < (-128 if causal else -64)) | (distance > (0 if causal else 64))
        return rounded_weights((q @ k.mT * 0.25).float().masked_fill(hidden, -torch.inf), v)

    inputs = [scale * torch.randn(1, 2, 300, 16).to(dtype) for scale in (norm, norm, 1)]
    upstream = torch.randn(1, 2, 300, 16).to(dtype)
    backend = ea.build("window", head_dim=16, window=129, causal=causal)
    definition = partial(naive.softmax_attention, scale=0.25, window=129, causal=causal)
    expected = with_gradients(definition, [x.double() for x in inputs], upstream)
    calls = (with_gradients(call, inputs, upstream) for call in (backend, plain))
    for actual, same, exact in zip(*calls, expected, strict=True):
        assert actual.dtype == dtype
        assert root_mean_square(actual, exact) <= 2 * root_mean_square(same, exact)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linformer_errs_at_most_twice_as_much_as_plain_products(gpu, dtype, heads, masked):
    def plain(q, k, v, mix_keys, mix_values):
        shown = mask[:, None, :, None]
        few_k, few_v = (mix.to(q.dtype) @ (x * shown) for mix, x in ((mix_keys, k), (mix_values, v)))
        shares = ((mix.abs() * shown.mT).sum(-1) / mix.abs().sum(-1) for mix in (mix_keys, mix_values))
        few_k, few_v = (
            x / share.unsqueeze(-1).to(x) for x, share in zip((few_k, few_v), shares, strict=True)
        )
        scores = q @ few_k.mT * 0.25
        return rounded_weights(scores, few_v) if q.dtype == dtype else scores.softmax(dim=-1) @ few_v

    def ours(q, k, v, mix_keys, mix_values):
        key_mask = mask if masked else None
        return linformer_attention(
            q, k, v, mix_keys=mix_keys, mix_values=mix_values, scale=0.25, key_mask=key_mask
        )

    mask = torch.arange(300).expand(2, -1) < (torch.tensor([[200], [300]]) if masked else 300)
    mixes = [torch.randn(*([heads] if heads else []), 32, 300) / 300**0.5 for _ in range(2)]
    inputs = [torch.randn(2, 2, 300, 16).to(dtype) for _ in range(3)]
    upstream = torch.randn(2, 2, 300, 16).to(dtype)
    expected = with_gradients(plain, [x.double() for x in (*inputs, *mixes)], upstream)
    calls = (with_gradients(call, [*inputs, *mixes], upstream) for call in (ours, plain))
    for actual, same, exact in zip(*calls, expected, strict=True):
        assert root_mean_square(actual, exact) <= 2 * root_mean_square(same, exact)


@pytest.mark.parametrize("name", ["exact", "linformer"])
def test_the_fused_kernel_reads_half_precision_as_it_is(gpu, monkeypatch, name):
    def kernel(q, k, v, **options):
        dtypes.append({x.dtype for x in (q, k, v)})
        return attention(q, k, v, **options)

    dtypes, attention = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(fused.F, "scaled_dot_product_attention", kernel)
    q = torch.randn(1, 2, 64, 16, dtype=torch.bfloat16)
    ea.build(name, head_dim=16, max_tokens=64, **({"rank": 8} if name == "linformer" else {}))(q, q, q)
    assert dtypes == [{torch.bfloat16}]


def test_scores_beyond_float16_stay_finite(gpu):
    q = torch.full((1, 1, 3, 4), 300.0, dtype=torch.float16)
    assert unfused.unfused_window(q, q, q, None, 1, 1, 1.0).isfinite().all()


def test_the_backward_pass_computes_weights_again(gpu, monkeypatch):
    monkeypatch.setattr(paths, "HELD", 2**16)
    backend = ea.build("window", head_dim=8, window=257)

    def peak_bytes(tokens):
        inputs = [torch.randn(1, 2, tokens, 8, requires_grad=True) for _ in range(3)]
        return peak(lambda: torch.autograd.grad(backend(*inputs).sum(), inputs), device="cpu").peak_bytes

    numbers = (peak_bytes(4096) - peak_bytes(2048)) / (2 * 2048 * 4)
    # A row of a block has 257 + 63 weights, of which one copy would be kept; vectors have 8 numbers.
    assert numbers < 320
