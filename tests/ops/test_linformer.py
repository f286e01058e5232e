"""Linformer is softmax over mixtures that stay averages of real tokens."""

import copy

import pytest
import torch
from backend_definitions import by_definition
from reference import assert_near, first_and_second_derivatives, random_mask, random_qkv
from torch.nn.attention import SDPBackend, sdpa_kernel

import efficient_attn as ea
from efficient_attn.ops import paths
from efficient_attn.ops.softmax import fused

TOKENS = 12


def linformer(**options):
    return ea.build("linformer", head_dim=8, num_heads=4, max_tokens=TOKENS, **options).double()


def set_mixing(backend, mix_keys, mix_values=None):
    with torch.no_grad():
        backend.core.mix_keys.copy_(mix_keys)
        backend.core.mix_values.copy_(mix_keys if mix_values is None else mix_values)


@pytest.mark.parametrize(("sharing", "entries"), [("heads", 2), ("none", 8), ("key-value", 1), ("layers", 1)])
def test_sharing_decides_how_many_mixtures_are_learned_and_those_of_the_identity_are_exact(sharing, entries):
    backend = linformer(rank=TOKENS, sharing=sharing)
    assert sum(x.numel() for x in backend.parameters()) == entries * TOKENS**2
    set_mixing(backend, torch.eye(TOKENS))
    q, k, v = random_qkv(q_tokens=4, k_tokens=7)
    mask = random_mask(2, 7)
    expected = ea.attention(q, k, v, key_mask=mask)
    assert (backend(q, k, v, key_mask=mask) - expected).abs().max() <= 1e-12


def test_gaussian_mixing_has_the_variance_of_the_paper():
    mix = ea.build("linformer", head_dim=8, max_tokens=2048, rank=64, init="gaussian").core.mix_keys
    # The variance of n Gaussian entries has a relative standard error of √(2/n).
    assert abs(mix.var().item() * 64 - 1) < 4.5 * (2 / mix.numel()) ** 0.5


@pytest.mark.parametrize("name", ["exact", "linformer"])
def test_the_fused_kernel_reads_half_precision_as_it_is(monkeypatch, name):
    def kernel(q, k, v, **options):
        dtypes.append({x.dtype for x in (q, k, v)})
        return attention(q, k, v, **options)

    # The path of a GPU, which multiplies half precision as it is.
    monkeypatch.setenv(paths.VARIABLE, "torch")
    monkeypatch.setattr(paths, "UPCAST", set())
    dtypes, attention = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(fused.F, "scaled_dot_product_attention", kernel)
    q = torch.randn(1, 2, 64, 16, dtype=torch.bfloat16)
    ea.build(name, head_dim=16, max_tokens=64, **({"rank": 8} if name == "linformer" else {}))(q, q, q)
    assert dtypes == [{torch.bfloat16}]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("sharing", ["none", "heads", pytest.param("key-value", marks=pytest.mark.slow)])
def test_half_precision_beyond_one_piece_is_float64_rounded_once(sharing):
    tokens, dtype = 1100, torch.bfloat16 if sharing == "none" else torch.float16
    q, k, v = (x.to(dtype) for x in random_qkv(1, 4, 2, tokens, tokens))
    backend = ea.build("linformer", head_dim=8, num_heads=4, max_tokens=tokens, rank=8, sharing=sharing)
    # Every piece matters: values grow along the sequence.
    v = (v + torch.linspace(0, 4, tokens)[:, None]).to(dtype)
    actual, expected = [], []
    for to, results in ((dtype, actual), (torch.float64, expected)):
        leaves = [x.to(to).requires_grad_() for x in (q, k, v)]
        out = copy.deepcopy(backend).to(to)(*leaves)
        results += [out, *torch.autograd.grad(out.sum(), leaves)]
    # A tensor is rounded once on its way out; what is summed before is wider.
    for left, right in zip(actual, expected, strict=True):
        assert (left - right).abs().max() <= 2 * torch.finfo(dtype).eps * right.abs().max()


@pytest.mark.parametrize("sharing", ["heads", "none"])
def test_a_mixture_whose_values_are_mixed_from_no_token_takes_no_part(sharing):
    backend = linformer(rank=3, sharing=sharing, init="gaussian")
    with torch.no_grad():
        backend.core.mix_values[..., 1, :9] = 0.0
    q, k, v = random_qkv(q_tokens=4, k_tokens=9)
    remaining = linformer(rank=2, sharing=sharing)
    set_mixing(remaining, backend.core.mix_keys[..., [0, 2], :], backend.core.mix_values[..., [0, 2], :])
    torch.testing.assert_close(backend(q, k, v), remaining(q, k, v), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sharing", ["heads", "none"])
def test_gradients_of_the_gradients_lack_no_factor(sharing, masked):
    backend = linformer(rank=3, sharing=sharing, init="gaussian")
    leaves = [*random_qkv(q_tokens=4, k_tokens=TOKENS), *backend.parameters()]
    mask = random_mask(2, TOKENS) if masked else None

    for x in leaves:
        x.requires_grad_()

    def ours(q, k, v, *parameters):
        return backend(q, k, v, key_mask=mask)

    def definition(q, k, v, *parameters):
        return by_definition(backend, q, k, v, key_mask=mask)

    # PyTorch's fused kernels have no second derivatives and raise; its operators have, on every device.
    with sdpa_kernel(SDPBackend.MATH):
        actual = first_and_second_derivatives(ours, leaves)
    expected = first_and_second_derivatives(definition, leaves)
    assert_near(actual, expected, 1e-12)


@pytest.mark.parametrize("instructions", ["avx512_bf16", "none"])
def test_bfloat16_products_follow_the_instructions_of_the_cpu_in_inference(monkeypatch, instructions):
    monkeypatch.setattr(paths, "bfloat16_instructions", lambda: instructions)
    dtype = torch.float32 if instructions == "none" else torch.bfloat16
    q, k, v = (x.to(torch.bfloat16) for x in random_qkv(1, 4, 2, 1100, 1100))
    backend = ea.build("linformer", head_dim=8, max_tokens=1100, rank=64)
    with torch.no_grad():
        assert paths.product_dtype(q) is dtype and paths.product_dtype(q.half()) is torch.float32
        out = backend(q, k, v)
        reference = backend(*(x.double() for x in (q, k, v)))
        plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        exact = ea.attention(*(x.double() for x in (q, k, v)))
    assert paths.product_dtype(q) is torch.float32
    errors = [((x - y).norm() / y.norm()).item() for x, y in ((out, reference), (plain, exact))]
    # Rounding of the mixture and of the projected rows comes to that of the output.
    assert errors[0] <= 2 * errors[1] and out.dtype is torch.bfloat16
