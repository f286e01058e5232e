"""The window is the dense band exactly, at every length and every window."""

from functools import partial

import pytest
import torch
from reference import random_mask, random_qkv, reference_attention

import efficient_attn as ea
from efficient_attn.measure.memory import peak
from efficient_attn.ops.paths import VARIABLE
from efficient_attn.ops.softmax import cpu_flash
from efficient_attn.ops.window import blocks as window_blocks
from efficient_attn.ops.window import blocks_backward as window_blocks_backward
from efficient_attn.ops.window import operator as window_operator

BLOCK = 64


@pytest.fixture
def products(monkeypatch):
    """Blocks inside the sequence go through plain products, however small the problem."""
    monkeypatch.setattr(window_operator, "_LARGE", 0)
    monkeypatch.setattr(window_operator, "_MANY", 1)


def band(window, causal):
    back = window - 1 if causal else window // 2
    ahead = 0 if causal else window // 2
    return lambda i, j: i - back <= j <= i + ahead


@pytest.mark.parametrize("path", ["cpu", "few large steps"], indirect=True)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [1, 3, 2 * BLOCK - 1, 2 * BLOCK + 1])
@pytest.mark.parametrize("tokens", [1, 2, 7, BLOCK, 97, 2 * BLOCK + 1])
def test_the_window_equals_the_dense_band(path, tokens, window, masked):
    q, k, v = random_qkv(2, 2, 1, tokens, tokens)
    mask = random_mask(2, tokens) if masked else None
    out = ea.build("window", head_dim=8, window=window)(q, k, v, key_mask=mask)
    reference = reference_attention(q, k, v, scale=8**-0.5, visible=band(window, False), key_mask=mask)
    assert (out - reference).abs().max() <= 1e-12


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [1, 2, 6, BLOCK, 131])
@pytest.mark.parametrize("queries", [1, 5, 130])
def test_a_causal_window_reads_the_last_keys_and_may_be_even(queries, window, masked):
    tokens = 130
    q, k, v = random_qkv(2, 2, 1, queries, tokens)
    mask = random_mask(2, tokens) if masked else None
    out = ea.build("window", head_dim=8, window=window, causal=True)(q, k, v, key_mask=mask)
    reference = reference_attention(
        q, k, v, scale=8**-0.5, visible=band(window, True), causal=True, key_mask=mask
    )
    assert (out - reference).abs().max() <= 1e-12


def dense_band(q, k, v, window, causal, mask, first=0):
    """Softmax over the band and the first real keys with the whole score matrix, in plain operators."""
    back, ahead = (window - 1, 0) if causal else (window // 2, window // 2)
    group, before = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    scores = q @ k.repeat_interleave(group, dim=1).mT * q.shape[-1] ** -0.5
    i = torch.arange(q.shape[2])[:, None] + before
    j = torch.arange(k.shape[2])
    real = torch.ones(len(q), k.shape[2], dtype=torch.bool) if mask is None else mask
    seen = torch.zeros(len(q), q.shape[2], k.shape[2], dtype=torch.bool)
    for entry, row in enumerate(real):
        chosen = torch.isin(j, row.nonzero()[:first, 0])
        seen[entry] = ((j >= i - back) & (j <= i + ahead) | chosen & ((j <= i) | (not causal))) & row
    weights = scores.masked_fill(~seen[:, None], -1e300).softmax(dim=-1) * seen[:, None]
    return weights @ v.repeat_interleave(group, dim=1)


# Blocks inside the sequence go through plain products if there are many, else through the kernel in groups.
@pytest.mark.parametrize(
    ("path", "by_products"),
    [("cpu", False), ("cpu", True), ("few large steps", False), ("many small steps", False)],
    indirect=["path"],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("window", [5, 129, 201])
@pytest.mark.parametrize("tokens", [5 * BLOCK, 9 * BLOCK + 1])
def test_whole_blocks_and_ends_join_forward_and_backward(
    monkeypatch, path, tokens, window, heads, masked, causal, by_products
):
    monkeypatch.setattr(window_operator, "_LARGE", 0)
    monkeypatch.setattr(window_operator, "_MANY", 1 if by_products else tokens)
    # Steps of a few blocks, the last ones shorter, on the way back no longer than what is kept between them.
    monkeypatch.setattr(window_blocks, "_SCORES", 3 * BLOCK * (window + BLOCK))
    monkeypatch.setattr(window_blocks_backward, "_NUMBERS", 0)
    queries = tokens - 100 if causal else tokens
    inputs = [x.requires_grad_() for x in random_qkv(2, *heads, queries, tokens)]
    mask = random_mask(2, tokens) if masked else None
    out = ea.build("window", head_dim=8, window=window, causal=causal)(*inputs, key_mask=mask)
    reference = dense_band(*inputs, window, causal, mask)
    given = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(x, inputs, given) for x in (out, reference))
    for one, other in zip((out, *found), (reference, *wanted), strict=True):
        assert (one - other).abs().max() <= 1e-12


@pytest.mark.parametrize("large", [0, 2**30])
def test_heads_between_tokens_in_memory_are_read_where_they_are(monkeypatch, large):
    monkeypatch.setattr(window_operator, "_LARGE", large)
    q, k, v = (torch.randn(2, 1200, 3, 8).transpose(1, 2) for _ in range(3))
    backend = ea.build("window", head_dim=8, window=65)
    assert torch.equal(backend(q, k, v), backend(*(x.contiguous() for x in (q, k, v))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_sequences_in_half_precision_are_float32_rounded_once(products, dtype):
    inputs = [torch.randn(1, 2, 1500, 8).to(dtype).requires_grad_() for _ in range(3)]
    given = torch.randn(1, 2, 1500, 8).to(dtype)
    backend = ea.build("window", head_dim=8, window=33)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found, wanted = (
        (out := backend(*x), *torch.autograd.grad(out, x, given.to(out))) for x in (inputs, exact)
    )
    for name, one, other in zip(["out", "q", "k", "v"], found, wanted, strict=True):
        assert one.dtype == dtype
        # The output is rounded; the gradients read it rounded, as every backward pass does.
        allowed = torch.finfo(dtype).eps * (other.abs() + (0 if name == "out" else other.abs().max()))
        assert ((one.double() - other).abs() <= allowed + 1e-5).all(), name


@pytest.mark.parametrize("norm", [1, 5, 20])
def test_long_sequences_stay_finite_and_right_when_norms_grow(products, norm):
    q, k, v = (torch.randn(1, 1, 1200, 16, dtype=torch.float64) for _ in range(3))
    inputs = [(norm * q).requires_grad_(), (norm * k).requires_grad_(), v.requires_grad_()]
    single = [x.detach().float().requires_grad_() for x in inputs]
    backend = ea.build("window", head_dim=16, window=65)
    outs = backend(*single), dense_band(*inputs, 65, False, None)
    # A score of n² times √dim entries is off by its own rounding, and so, relatively, is every weight.
    rounding = 8 * torch.finfo(torch.float32).eps * norm**2 * 16**0.5
    assert (outs[0] - outs[1]).abs().max() <= rounding * v.abs().max()
    assert all(x.isfinite().all() for x in torch.autograd.grad(outs[0].sum(), single))


def test_a_row_without_a_visible_key_gives_zeros_in_a_long_sequence_too(products):
    inputs = [x.requires_grad_() for x in random_qkv(1, 2, 2, 1400, 1400)]
    mask = torch.ones(1, 1400, dtype=torch.bool)
    mask[:, 600:700] = False
    out = ea.build("window", head_dim=8, window=33)(*inputs, key_mask=mask)
    assert (out[:, :, 616:684] == 0).all() and (out[:, :, 615] != 0).any()
    by_q, by_k, by_v = torch.autograd.grad(out.sum(), inputs)
    assert (by_q[:, :, 616:684] == 0).all()
    assert (by_k[:, :, 600:700] == 0).all() and (by_v[:, :, 600:700] == 0).all()


def test_without_the_fused_kernel_the_plain_operators_say_the_same(monkeypatch):
    q, k, v = random_qkv(1, 2, 2, 400, 400)
    backend = ea.build("window", head_dim=8, window=65)
    fused = backend(q, k, v)
    monkeypatch.setattr(cpu_flash, "_FORWARD", None)
    assert (backend(q, k, v) - fused).abs().max() <= 1e-12


@pytest.mark.parametrize(("heads", "dim"), [(2, 32), (8, 64)])
def test_training_grows_by_output_and_gradients_alone(heads, dim, monkeypatch):
    # On other devices autograd keeps the weights.
    monkeypatch.setenv(VARIABLE, "")
    lengths = 2048, 4096
    backend = ea.build("window", head_dim=dim, window=257)
    peaks = []
    for tokens in lengths:
        inputs = [torch.randn(1, heads, tokens, dim, requires_grad=True) for _ in range(3)]
        given = torch.randn(1, heads, tokens, dim)
        call = partial(
            lambda inputs, given: torch.autograd.grad(backend(*inputs), inputs, given), inputs, given
        )
        peaks.append(peak(call, device="cpu").peak_bytes)
    # Per token an output, three gradients and a log-sum-exp, in float32.
    per_token = heads * (4 * dim + 1) * 4
    assert peaks[1] - peaks[0] == pytest.approx(per_token * (lengths[1] - lengths[0]), rel=0.02)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_over_all_tokens_equals_exact_attention_and_its_gradients(causal):
    inputs = [x.requires_grad_() for x in random_qkv(1, 2, 2, 70, 70)]
    outs = [
        ea.build(name, head_dim=8, causal=causal, **options)(*inputs)
        for name, options in (("window", {"window": 139}), ("exact", {}))
    ]
    gradients = [torch.autograd.grad(out.sin().sum(), inputs) for out in outs]
    assert (outs[0] - outs[1]).abs().max() <= 1e-12
    for one, other in zip(*gradients, strict=True):
        assert (one - other).abs().max() <= 1e-12


def test_time_and_memory_do_not_know_how_long_the_rest_of_the_sequence_is():
    backend = ea.build("window", head_dim=16, window=33)
    peaks = []
    for tokens in (2048, 4096, 8192):
        q = torch.randn(1, 2, tokens, 16)
        with torch.no_grad():
            peaks.append(peak(lambda q=q: backend(q, q, q), device="cpu").peak_bytes)
    # Affine in tokens: equal steps for doubled steps, to the bytes that padding to blocks may add.
    assert peaks[2] - peaks[1] == pytest.approx(2 * (peaks[1] - peaks[0]), rel=0.01)


def test_steps_of_other_devices_hold_no_more_numbers_than_they_may(monkeypatch):
    monkeypatch.setenv("EFFICIENT_ATTN_KERNELS", "torch")
    monkeypatch.setattr("efficient_attn.ops.paths.HELD", 2**18)
    tokens, heads, dim = 8192, 2, 16
    q = torch.randn(1, heads, tokens, dim)
    backend = ea.build("window", head_dim=dim, window=257)
    with torch.no_grad():
        found = peak(lambda: backend(q, q, q), device="cpu").peak_bytes
    # Padded queries, keys and values, the outputs of all steps and their concatenation; of a step scores,
    # masked scores, weights and a mask, slices of keys and values. All scores are 10 times as many.
    assert found <= 4 * (5 * 1.1 * q.numel() + 5 * 2**18)


def test_an_even_window_without_a_middle_is_refused_and_both_neighbours_named():
    with pytest.raises(ea.OptionError, match=r"window=4 has no middle.* 3 or 5"):
        ea.build("window", head_dim=8, window=4)


# Padding of the second sequence, and holes in both.
PADDED = {
    "whole": lambda tokens: None,
    "left": lambda tokens: (
        torch.stack([torch.ones(tokens), (torch.arange(tokens) >= tokens // 3).float()]) > 0
    ),
    "right": lambda tokens: (
        torch.stack([torch.ones(tokens), (torch.arange(tokens) < tokens // 2).float()]) > 0
    ),
    "all": lambda tokens: torch.stack([torch.ones(tokens), torch.zeros(tokens)]) > 0,
    "holes": lambda tokens: random_mask(2, tokens),
}


@pytest.mark.parametrize(
    ("path", "large"),
    [("cpu", 0), ("cpu", 2**30), ("few large steps", 0), ("many small steps", 0)],
    indirect=["path"],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", PADDED)
@pytest.mark.parametrize(("window", "first"), [(1, 4), (5, 1), (9, 20), (129, 4)])
def test_global_tokens_are_columns_of_the_dense_mask_forward_and_backward(
    monkeypatch, path, large, window, first, padded, causal
):
    monkeypatch.setattr(window_operator, "_LARGE", large)
    monkeypatch.setattr(window_operator, "_MANY", 1)
    # The rows window − 1, window and window + first are where a global key leaves the window.
    tokens = 3 * BLOCK + 1
    inputs = [x.requires_grad_() for x in random_qkv(2, 4, 2, tokens - 37 if causal else tokens, tokens)]
    mask = PADDED[padded](tokens)
    backend = ea.build("window", head_dim=8, window=window, causal=causal, global_tokens=first)
    out = backend(*inputs, key_mask=mask)
    reference = dense_band(*inputs, window, causal, mask, first)
    given = torch.randn_like(out)
    gradients = [torch.autograd.grad(x, inputs, given) for x in (out, reference)]
    for actual, expected in zip((out, *gradients[0]), (reference, *gradients[1]), strict=True):
        assert (actual - expected).abs().max() <= 1e-12


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("padded", PADDED)
@pytest.mark.parametrize(("window", "first"), [(1, 4), (5, 1), (9, 20), (17, 4)])
@pytest.mark.parametrize("pieces", [[1] * 43, [2, 1, 0, 20, 20], [30, 13], [20, 1, 1, 1, 7, 13]])
def test_global_tokens_stream_in_pieces_as_in_one_call(pieces, window, first, padded, trained):
    inputs = [x.requires_grad_(trained) for x in random_qkv(2, 4, 2, 43, 43)]
    mask = PADDED[padded](43)
    backend = ea.build("window", head_dim=8, window=window, causal=True, global_tokens=first)
    state, outs = None, []
    for number, tokens in enumerate(pieces):
        part = slice(sum(pieces[:number]), sum(pieces[:number]) + tokens)
        given = [x[:, :, part] for x in inputs]
        out, state = backend.extend(*given, state, key_mask=None if mask is None else mask[:, part])
        outs.append(out)
    expected = dense_band(*inputs, window, True, mask, first)
    assert (torch.cat(outs, dim=2) - expected).abs().max() <= 1e-12
    assert state.k.shape[2] <= 2 * (window - 1) + first and state.first_k.shape[2] <= first
    if trained:
        given = torch.randn_like(expected)
        gradients = [torch.autograd.grad(x, inputs, given) for x in (torch.cat(outs, dim=2), expected)]
        for actual, wanted in zip(*gradients, strict=True):
            assert (actual - wanted).abs().max() <= 1e-12


def test_a_mask_given_late_and_beams_keep_the_global_tokens():
    q, k, v = random_qkv(2, 2, 2, 12, 12)
    backend = ea.build("window", head_dim=8, window=3, causal=True, global_tokens=2)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 6:8] = False
    state = None
    for start, stop in ((0, 1), (1, 4), (4, 5), (5, 6)):
        _, state = backend.extend(*(x[:, :, start:stop] for x in (q, k, v)), state)
    out, state = backend.extend(*(x[:, :, 6:9] for x in (q, k, v)), state, key_mask=mask[:, 6:9])
    swapped = type(state)(*(x.flip(0) for x in state))
    outs = []
    for token in (9, 10, 11):
        step, swapped = backend.extend(*(x[:, :, token : token + 1].flip(0) for x in (q, k, v)), swapped)
        outs.append(step)
    last = torch.cat(outs, dim=2)
    expected = dense_band(q, k, v, 3, True, mask, 2)
    assert (out - expected[:, :, 6:9]).abs().max() <= 1e-12
    assert (last.flip(0) - expected[:, :, 9:]).abs().max() <= 1e-12


def test_global_tokens_have_second_derivatives():
    inputs = [x.requires_grad_() for x in random_qkv(1, 2, 1, 20, 20)]
    backend = ea.build("window", head_dim=8, window=5, causal=True, global_tokens=2)
    assert torch.autograd.gradgradcheck(lambda *x: backend(*x).sin(), inputs, fast_mode=True)

    def last(*x: torch.Tensor) -> torch.Tensor:
        _, state = backend.extend(*(y[:, :, :19] for y in x))
        return backend.extend(*(y[:, :, 19:] for y in x), state)[0].sin()

    assert torch.autograd.gradgradcheck(last, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_global_tokens_in_half_precision_are_float32_rounded_once(products, dtype):
    inputs = [torch.randn(1, 2, 1500, 8).to(dtype).requires_grad_() for _ in range(3)]
    given = torch.randn(1, 2, 1500, 8).to(dtype)
    backend = ea.build("window", head_dim=8, window=33, causal=True, global_tokens=4)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    results = [(out := backend(*x), *torch.autograd.grad(out, x, given.to(out))) for x in (inputs, exact)]
    for name, actual, expected in zip(["out", "q", "k", "v"], *results, strict=True):
        allowed = torch.finfo(dtype).eps * (expected.abs() + (0 if name == "out" else expected.abs().max()))
        assert ((actual.double() - expected).abs() <= allowed + 1e-5).all(), name


def test_the_shipped_decoder_needs_its_first_token():
    q, k, v = ea.sample(19, 4)
    exact = ea.attention(q, k, v, causal=True)
    errors = [
        float((ea.attention(q, k, v, "window", causal=True, global_tokens=n) - exact).norm() / exact.norm())
        for n in (0, 4)
    ]
    # Measured: .822 without global tokens, .074 with four.
    assert errors[0] > 0.5 and errors[1] <= 0.08


def test_operations_count_the_global_keys_outside_of_the_windows():
    for causal, tokens, first in ((True, 30, 4), (False, 30, 4), (True, 3, 9)):
        options = {"window": 7, "global_tokens": first}
        backend = ea.build("window", head_dim=1, causal=causal, **options)
        ones = torch.ones(1, 1, tokens, 1)
        pairs = (backend.attention_weights(ones, ones) > 0).sum()
        assert backend.spec.flops(backend.problem, backend.options, tokens) == 2 * 2 * pairs


def test_global_tokens_beside_learned_distances_are_refused():
    with pytest.raises(ea.OptionError, match="set one of the two to 0"):
        ea.build("window", head_dim=8, num_heads=2, max_distance=4, global_tokens=2)
