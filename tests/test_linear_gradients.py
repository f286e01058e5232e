"""Gradients of linear attention against the estimator written out, with halved chunks and negative scales."""

import math

import pytest
import torch
from reference import random_qkv

import efficient_attn as ea
from efficient_attn.ops.linear import causal_exponential, scaled_chunks, segments, weak_chunks
from efficient_attn.ops.linear import state as linear_state
from efficient_attn.ops.linear.features import MAPS
from efficient_attn.ops.paths import VARIABLE

LINEAR = [name for name in ea.list_backends() if name.startswith(("linear-", "performer-"))]
SIGNED_AND_POSITIVE = ["performer-trig", "linear-elu"]


def built(name, *, causal=True, scale=None, head_dim=8):
    size = ea.spec(name).size_option
    backend = ea.build(name, head_dim=head_dim, causal=causal, scale=scale, **({size: 32} if size else {}))
    if backend.needs_calibration:
        backend.calibrate(*random_qkv(1, 2, 2, 32, 32, head_dim, seed=9)[:2])
    return backend


def by_definition(backend, q, k, v):
    """Σ_j φ(q)·φ(k_j) v_j / Σ_j φ(q)·φ(k_j) over earlier keys in float64, from differentiable features."""
    kind = backend.core.features.kind
    directions = getattr(backend.core.features, "projection", None)
    root = math.sqrt(backend.problem.factor)
    of_q, of_k = (
        MAPS[kind].features(x.double() * root, None if directions is None else directions.double())
        for x in (q, k)
    )
    if of_q.values is None:
        logs = (of_q.log_scale.unsqueeze(-2) + of_k.log_scale.unsqueeze(-3)).logsumexp(dim=-1)
        signs = 1.0
    else:
        products = of_q.values @ of_k.values.mT
        logs, signs = products.abs().log() + of_k.log_scale.mT, products.sign()
    later = torch.ones(logs.shape[-2:], dtype=torch.bool).triu(1)
    logs = logs.masked_fill(later, -torch.inf)
    weights = signs * (logs - logs.detach().amax(dim=-1, keepdim=True)).exp()
    return weights @ v.double() / weights.sum(dim=-1, keepdim=True)


def rising(norm):
    """Inputs whose keys grow, so that early rows of a chunk see only keys far below its largest."""
    q, k, v = random_qkv(1, 2, 2, 150, 150, head_dim=8, value_dim=4)
    growth = torch.linspace(0.05, norm, 150, dtype=torch.float64)[:, None]
    return [q, k * growth, v]


@pytest.mark.parametrize("path", ["", "torch"])
@pytest.mark.parametrize("name", ["performer-positive", "linear-elu"])
def test_gradients_are_right_where_weak_chunks_are_computed_again(name, path, monkeypatch):
    found, read = [], weak_chunks.weak_chunks

    def recorded(*args):
        for chunks in read(*args):
            found.extend(chunks.tolist())
            yield chunks

    for module in (weak_chunks, segments):
        monkeypatch.setattr(module, "weak_chunks", recorded)
    # Every row is weak; in float64 rounding hides nothing.
    monkeypatch.setitem(weak_chunks._WEAK, torch.float64, 1e4)
    monkeypatch.setenv(VARIABLE, path)
    monkeypatch.setattr(causal_exponential, "BACKWARD_CHUNK", 16)
    backend, inputs = built(name), [x.requires_grad_() for x in rising(6.0)]
    wanted = torch.autograd.grad(by_definition(backend, *inputs).sin().sum(), inputs)
    gradients = torch.autograd.grad(backend(*inputs).sin().sum(), inputs)
    # Two heads of 150 tokens, forward and backward.
    chunks = -(-150 // (scaled_chunks._LARGE_CHUNK if path else scaled_chunks.CHUNK))
    taken = path or name == "linear-elu"
    assert len(found) == (2 * 2 * chunks if taken else 0)
    for one, other in zip(gradients, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-9 * other.abs().max()


def test_other_devices_compute_a_fixed_number_of_weak_chunks_again(monkeypatch):
    monkeypatch.setenv(VARIABLE, "torch")
    rows = torch.zeros(2, 3, 4, 1, dtype=torch.bool)
    rows[0, 2, :2], rows[1, 1, :3] = True, True
    monkeypatch.setattr(weak_chunks, "_FEATURES", 2 * 4 * 8)
    (found,) = weak_chunks.weak_chunks(rows, 8)
    assert found.tolist() == [4, 2]
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(weak_chunks, "_FEATURES", 1)
    assert [x.tolist() for x in weak_chunks.weak_chunks(rows, 8)] == [[2], [4]]


def test_gradients_are_right_where_pieces_of_exponential_features_are_halved(monkeypatch):
    pieces, query_gradients = [], causal_exponential._query_gradients
    monkeypatch.setenv(VARIABLE, "")

    def recorded(*args):
        found = query_gradients(*args)
        pieces.extend(found[1])
        return found

    monkeypatch.setattr(causal_exponential, "_query_gradients", recorded)
    monkeypatch.setitem(linear_state.TINY, torch.float64, 0.25)
    backend, inputs = built("performer-positive"), [x.requires_grad_() for x in rising(6.0)]
    wanted = torch.autograd.grad(by_definition(backend, *inputs).sin().sum(), inputs)
    found = torch.autograd.grad(backend(*inputs).sin().sum(), inputs)
    assert len(pieces) > math.ceil(150 / causal_exponential.BACKWARD_CHUNK), "nothing was halved"
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-9 * other.abs().max()


@pytest.mark.parametrize("path", ["", "torch"])
@pytest.mark.parametrize("name", ["performer-positive", *SIGNED_AND_POSITIVE])
def test_gradients_stay_finite_where_early_rows_lie_far_below_their_chunk(name, path, monkeypatch):
    monkeypatch.setenv(VARIABLE, path)
    inputs = [x.float().requires_grad_() for x in rising(60.0)]
    out = built(name)(*inputs)
    for one in (out, *torch.autograd.grad(out.sin().sum(), inputs)):
        assert one.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_a_scale_below_zero_is_the_scale_above_it_for_turned_queries(name, causal):
    inputs = [x.requires_grad_() for x in random_qkv(1, 4, 2, 90, 90)]
    turned = [-inputs[0], *inputs[1:]]
    below, above = (built(name, causal=causal, scale=scale) for scale in (-0.4, 0.4))
    above.load_state_dict(below.state_dict())

    def results(backend, given):
        out = backend(*given)
        found = [out, *torch.autograd.grad(out.sin().sum(), inputs)]
        if causal:
            first, state = backend.extend(*(x[..., :70, :] for x in given))
            second, _ = backend.extend(*(x[..., 70:, :] for x in given), state)
            found += [first, second]
        return found

    for one, other in zip(results(below, inputs), results(above, turned), strict=True):
        assert (one - other).abs().max() <= 1e-11 * other.abs().max()
