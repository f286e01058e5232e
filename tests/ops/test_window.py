"""The window is softmax over a band of keys and the global tokens, at every length, on every path."""

from functools import partial

import pytest
import torch
from backend_definitions import by_definition
from plain_attention import LARGE, bounds, error, problem, results
from reference import largest_difference, random_mask, random_qkv

import efficient_attn as ea
from efficient_attn.measure.memory import peak
from efficient_attn.ops.paths import VARIABLE
from efficient_attn.ops.softmax import cpu_flash
from efficient_attn.ops.window import operator, unfused
from efficient_attn.ops.window.global_keys import WindowInputs

BLOCK = 64
# Padding of the second sequence, and holes in both.
PADDED = {
    "none": lambda tokens: None,
    "left": lambda tokens: torch.arange(tokens) >= torch.tensor([[0], [tokens // 3]]),
    "all": lambda tokens: torch.arange(tokens) < torch.tensor([[tokens], [0]]),
    "holes": lambda tokens: random_mask(2, tokens),
}
# Short of a block, and several with a rest; a window of all keys; the rows at which a global key leaves it.
SIZES = [
    *[(1, 1, 0), (7, 3, 0), (97, 1, 0), (97, 201, 0), (2 * BLOCK + 1, 2 * BLOCK + 1, 0)],
    *[(5 * BLOCK, 129, 0), (13 * BLOCK + 1, 61, 0), (6 * BLOCK + 1, 201, 0)],
    *[(3 * BLOCK + 1, 1, 4), (3 * BLOCK + 1, 5, 1), (3 * BLOCK + 1, 9, 20), (3 * BLOCK + 1, 129, 4)],
]


def built(window, **options):
    return ea.build("window", head_dim=8, window=window, **options)


SLOW = pytest.mark.slow
WAYS = [("cpu", True), ("few large steps", True), ("many small steps", True)]
WAYS += [pytest.param("cpu", False, marks=SLOW)]


@pytest.mark.parametrize(("path", "fused"), WAYS, indirect=["path"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", ["none", "holes", *(pytest.param(x, marks=SLOW) for x in ("left", "all"))])
@pytest.mark.parametrize(("tokens", "window", "first"), SIZES)
def test_results_are_those_of_the_definition(path, fused, tokens, window, first, padded, causal, monkeypatch):
    if not fused:
        monkeypatch.setattr(cpu_flash, "available", lambda *tensors: False)
    # Several tiles, the last with fewer blocks.
    for constant, blocks in (("BLOCKS", 6), ("BLOCKS_BACK", 6), ("BLOCKS_SHORT", 6)):
        monkeypatch.setattr(operator, constant, blocks)
    # A causal window may be even, and its queries are the last positions of the keys.
    window, queries = (window + 1, max(1, tokens - 37)) if causal else (window, tokens)
    inputs = [x.requires_grad_() for x in random_qkv(2, 4, 2, queries, tokens)]
    mask = PADDED[padded](tokens)
    backend = built(window, causal=causal, global_tokens=first)
    expected = by_definition(backend, *inputs, key_mask=mask)
    assert largest_difference(backend(*inputs, key_mask=mask), expected, inputs) <= 1e-12


def test_training_grows_by_output_and_gradients_alone(monkeypatch):
    # On other devices autograd keeps the weights.
    monkeypatch.setenv(VARIABLE, "")
    lengths, heads, dim = (2048, 4096), 4, 64
    backend = ea.build("window", head_dim=dim, window=257)
    peaks = []
    for tokens in lengths:
        inputs = [torch.randn(1, heads, tokens, dim, requires_grad=True) for _ in range(3)]
        upstream = torch.randn(1, heads, tokens, dim)
        call = partial(lambda x, g: torch.autograd.grad(backend(*x), x, g), inputs, upstream)
        peaks.append(peak(call, device="cpu").peak_bytes)
    # Per token an output, three gradients and a log-sum-exp, in float32.
    per_token = heads * (4 * dim + 1) * 4
    assert peaks[1] - peaks[0] == pytest.approx(per_token * (lengths[1] - lengths[0]), rel=0.02)


def test_a_weight_of_one_is_one_in_gradients_too():
    # Scores further apart than float32's exponents reach, at a scale that is a power of two.
    q, k, v = (x.float().requires_grad_() for x in random_qkv(1, 1, 1, 1024, 1024, 16, 16))
    out = ea.build("window", head_dim=16, window=129, global_tokens=2)(1e7 * q, k, v)
    (grad,) = torch.autograd.grad(out.sum(), v)
    assert torch.equal(grad, grad.round()) and grad.sum() == out.numel()


def test_steps_of_other_devices_hold_no_more_numbers_than_they_may(monkeypatch):
    monkeypatch.setenv(VARIABLE, "torch")
    monkeypatch.setattr("efficient_attn.ops.paths.HELD", 2**18)
    q = torch.randn(1, 2, 8192, 16)
    backend = ea.build("window", head_dim=16, window=257)
    with torch.no_grad():
        peak_bytes = peak(lambda: backend(q, q, q), device="cpu").peak_bytes
    # Padded queries, keys and values, the outputs of all steps and their concatenation; of a step scores,
    # masked scores, weights and a mask, slices of keys and values. All scores are 10 times as many.
    assert peak_bytes <= 4 * (5 * 1.1 * q.numel() + 5 * 2**18)


def test_other_devices_compute_weights_again_in_the_backward_pass(monkeypatch):
    monkeypatch.setenv(VARIABLE, "torch")
    monkeypatch.setattr("efficient_attn.ops.paths.HELD", 2**16)
    backend = built(257)

    def peak_bytes(tokens):
        inputs = [torch.randn(1, 2, tokens, 8, requires_grad=True) for _ in range(3)]
        return peak(lambda: torch.autograd.grad(backend(*inputs).sum(), inputs), device="cpu").peak_bytes

    numbers = (peak_bytes(4096) - peak_bytes(2048)) / (2 * 2048 * 4)
    # A row of a block has 257 + 63 weights, of which one copy would be kept; vectors have 8 numbers.
    assert numbers < 320


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "causal"), [("window", False), ("window", True), ("linformer", False)])
def test_half_precision_products_err_at_most_twice_as_plain_attention(name, causal, dtype, monkeypatch):
    monkeypatch.setenv(VARIABLE, "torch")
    monkeypatch.setattr("efficient_attn.ops.paths.UPCAST", set())
    task = problem(name, dtype, "cpu", LARGE, causal=causal, grouped=True)
    for x, (reference, bound) in zip(results(task.call, task.inputs), bounds(task), strict=True):
        assert x.dtype is dtype and error(x, reference) <= bound


def test_scores_beyond_float16_stay_finite(monkeypatch):
    # A GPU multiplies half precision as it is.
    monkeypatch.setattr("efficient_attn.ops.paths.UPCAST", set())
    q = torch.full((1, 1, 3, 4), 300.0, dtype=torch.float16)
    assert unfused.unfused_window(WindowInputs(q, q, q, None, 1, 1, 1.0)).isfinite().all()


def test_the_shipped_decoder_needs_its_first_token():
    q, k, v = ea.sample(19, 4)
    exact = ea.attention(q, k, v, causal=True)
    outs = [ea.attention(q, k, v, "window", causal=True, global_tokens=first) for first in (0, 4)]
    errors = [float((out - exact).norm() / exact.norm()) for out in outs]
    # Measured: .822 without global tokens, .074 with four.
    assert errors[0] > 0.5 and errors[1] <= 0.08


@pytest.mark.parametrize(("causal", "count"), [(True, 0), (True, 4), (False, 0), (False, 4)])
@pytest.mark.parametrize("instructions", ["amx_bf16", "avx512_bf16"])
def test_bfloat16_in_tiles_is_one_call_per_block_with_the_errors_of_the_other_path(
    causal, count, instructions, monkeypatch
):
    calls, attention = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr("efficient_attn.ops.window.attention.bfloat16_instructions", lambda: instructions)
    monkeypatch.setattr(
        "efficient_attn.ops.window.attention.F.scaled_dot_product_attention",
        lambda *inputs, **options: calls.append(inputs[0].shape[-2]) or attention(*inputs, **options),
    )
    q, k, v = (x.bfloat16() for x in random_qkv(2, 4, 2, 700, 700))
    backend = ea.build("window", head_dim=8, causal=causal, window=131, global_tokens=count)
    with torch.no_grad():
        out = backend(q, k, v)
        expected = backend(*(x.double() for x in (q, k, v)))
        if causal:
            # A step by a state, whose first tokens lie outside the window.
            _, state = backend.extend(q[..., :400, :], k[..., :400, :], v[..., :400, :])
            step, _ = backend.extend(q[..., 400:, :], k[..., 400:, :], v[..., 400:, :], state)
            torch.testing.assert_close(step.double(), expected[..., 400:, :], atol=2e-2, rtol=2e-2)
    assert ((out - expected).norm() / expected.norm()).item() < 4e-3
    tiles = instructions == "amx_bf16"
    assert calls[:6] == [128] * 5 + [60] if tiles else not calls
