"""Opened clusters of `window-clusters`, against the definition written out query by query."""

from dataclasses import replace

import jaxtyping
import pytest
import torch
from launches import COUNTED, forward, forward_backward, other_device, prepared
from reference import random_mask, random_qkv, reference_attention
from torch.autograd import gradcheck
from written_out import BLOCK, CLUSTERS, PROBES, SCALE, WINDOW, one_by_one, runs_at, size_at

import efficient_attn as ea
from efficient_attn.ops.clusters import probing
from efficient_attn.ops.clusters.trees import causal_stages, full_stages, places, sort_runs
from efficient_attn.testing import check_backend, check_names

CAUSAL = pytest.mark.parametrize("causal", [False, True])


def built(causal=False, **options):
    sizes = {"window": WINDOW, "clusters": CLUSTERS, "probes": PROBES, "global_tokens": 0}
    return ea.build("window-clusters", head_dim=8, causal=causal, **{**sizes, **options})


@pytest.mark.usefixtures("path")
@CAUSAL
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("tokens", [1, 5, 24, 67])
def test_the_output_is_the_definition_of_every_query(tokens, first, causal):
    q, k, v = random_qkv(1, 2, 1, tokens, tokens)
    out = built(causal, global_tokens=first)(q, k, v)[0]
    for head in range(2):
        wanted = one_by_one(q[0, head], k[0, 0], v[0, 0], causal=causal, first=first)
        assert (out[head] - wanted).abs().max() <= 1e-12


@pytest.mark.usefixtures("path")
@CAUSAL
@pytest.mark.parametrize("first", [0, 3])
def test_long_blocks_are_read_some_rows_at_a_time(first, causal, monkeypatch):
    q, k, v = (x.requires_grad_() for x in random_qkv(2, 4, 2, 67, 67))
    mask = torch.arange(67) >= torch.tensor([[3], [0]])
    found = []
    for rows in (128, 3):
        monkeypatch.setattr(probing, "_ROWS", rows)
        out = built(causal, global_tokens=first)(q, k, v, key_mask=mask)
        found.append((out, *torch.autograd.grad(out.sin().sum(), (q, k, v))))
    assert all((one - other).abs().max() <= 1e-12 for one, other in zip(*found, strict=True))


@pytest.mark.usefixtures("path")
@CAUSAL
def test_padding_in_front_and_behind_is_as_if_it_were_not_there(causal):
    # The padding behind is long enough for clusters of a third size, which no entry has without it.
    q, k, v = random_qkv(3, 2, 2, 150, 150)
    mask = torch.arange(150) >= torch.tensor([[3], [0], [20]])
    mask &= torch.arange(150) < torch.tensor([[65], [30], [67]])
    for probes in (1, 4):
        out = built(causal, probes=probes)(q, k, v, key_mask=mask)
        for entry, (low, high) in enumerate([(3, 65), (0, 30), (20, 67)]):
            alone = [x[entry : entry + 1, :, low:high] for x in (q, k, v)]
            assert (out[entry, :, low:high] - built(causal, probes=probes)(*alone)[0]).abs().max() <= 1e-12


@pytest.mark.usefixtures("path")
@CAUSAL
@pytest.mark.parametrize("masked", [False, True])
def test_as_many_probes_as_clusters_are_exact_attention(masked, causal):
    for tokens, queries in ((67, 67), (67, 9 if causal else 67), (200, 200)):
        q, k, v = random_qkv(2, 4, 2, queries, tokens)
        mask = random_mask(2, tokens) if masked else None
        out = built(causal, probes=CLUSTERS, global_tokens=2)(q, k, v, key_mask=mask)
        wanted = reference_attention(q, k, v, scale=SCALE, causal=causal, key_mask=mask)
        assert (out - wanted).abs().max() <= 1e-12


def test_no_probes_are_the_backend_without_the_option():
    q, k, v = random_qkv(2, 4, 2, 67, 67)
    without = ea.build("window-clusters", head_dim=8, window=WINDOW, clusters=CLUSTERS)
    assert torch.equal(built(probes=0)(q, k, v), without(q, k, v))
    assert type(built(probes=0).core) is type(without.core) is not type(built().core)


def test_later_keys_that_would_move_every_cluster_move_no_earlier_output():
    q, k, v = random_qkv(1, 2, 2, 64, 64)
    counted = torch.ones(1, 64, dtype=torch.bool)
    for cut in (17, 32, 47):
        later = k.clone()
        # Far away along one axis, so that a tree with them would be halved elsewhere.
        later[:, :, cut:] = 50 * torch.linspace(-1, 1, 64 - cut, dtype=k.dtype)[:, None] * torch.eye(8)[0]
        whole = [sort_runs(keys, counted, [(4, 0)], BLOCK) // BLOCK for keys in (k, later)]
        assert not torch.equal(*whole)
        out = built(causal=True)(q, later, v)[:, :, :cut]
        assert (out - built(causal=True)(q, k, v)[:, :, :cut]).abs().max() <= 1e-12


@CAUSAL
@pytest.mark.parametrize("trained", [False, True])
def test_keys_of_any_size_leave_outputs_among_the_values(trained, causal):
    q, k, v = (x.float() for x in random_qkv(1, 2, 2, 100, 100, value_dim=8))
    for size in (30.0, 3000.0):
        out = built(causal)(q * size, (k * size).requires_grad_(trained), v)
        assert float(out.detach().abs().max()) <= float(v.abs().max()) * (1 + 1e-5)


@CAUSAL
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_those_of_finite_differences_for_fixed_clusters(masked, causal):
    leaves = [x.requires_grad_() for x in random_qkv(2, 2, 1, 27, 27, 3, 2)]
    mask = torch.arange(27) < torch.tensor([[27], [21]]) if masked else None
    backend = ea.build("window-clusters", head_dim=3, window=4, clusters=4, probes=1, causal=causal)
    assert gradcheck(lambda *x: backend(*x, key_mask=mask), leaves, fast_mode=True)


@pytest.mark.parametrize("clusters", [1, 2, 5, 8])
@pytest.mark.parametrize("block", [2, 4])
@CAUSAL
def test_every_far_key_lies_in_one_cluster_and_clusters_are_few(causal, block, clusters):
    plan = causal_stages if causal else full_stages
    for tokens in (1, 7, 30, 100, 333):
        stages = plan(tokens, block=block, clusters=clusters, first=0)
        begin = 0
        for stage in stages if causal else stages[-1:]:
            assert stage.begin == begin and begin % stage.layout.block == 0
            begin, size = stage.end, stage.layout.block
            blocks = stage.runs(tokens, causal)
            runs, read = places(blocks, -(-tokens // size))
            owners = [(run, one) for run in runs for one in range(1 << run[0])]
            for start, one in zip(range(stage.begin, stage.end, size), read, strict=True):
                places_ = sorted(((n << level) + i) * size for (level, n), i in (owners[c] for c in one))
                near = range(start - size, start + size if causal else start + 2 * size)
                last = start if causal else tokens
                assert places_ == [j for j in range(0, last, size) if j not in near]
                assert len(one) <= max(clusters, 2 if causal else 1)
        assert begin == tokens


@CAUSAL
def test_launches_are_bounded_without_synchronisation_and_grow_with_doublings_alone(causal):
    def found(tokens):
        with other_device():
            sizes = {"window": 16, "clusters": 64, "probes": 4, "global_tokens": 0}
            backend, inputs = prepared(
                "window-clusters", causal=causal, tokens=tokens, heads=2, head_dim=8, **sizes
            )
            both = forward(backend, inputs), forward_backward(backend, inputs)
        assert not any(count.syncs for count in both)
        return [count.launches for count in both]

    short, long, longest = (found(tokens) for tokens in (512, 1024, 2048))
    assert short[0] <= 420 and (short[1] <= 560 or not COUNTED)
    # A causal sequence has a stage for each size of cluster, which doubles; a full one has one size.
    for one, other in ((short, long), (long, longest)):
        assert other[0] - one[0] <= (460 if causal else 0) and other[1] - one[1] <= (620 if causal else 0)


# Torch's compiler stumbles over checked shapes.
COMPILED = "compiled_it_is_the_same"


@pytest.mark.parametrize("path", ["cpu", "few large steps"], indirect=True)
@pytest.mark.parametrize(
    "checks",
    [
        pytest.param(
            [name for name in check_names() if name != COMPILED], marks=pytest.mark.slow, id="eager"
        ),
        pytest.param([COMPILED], marks=pytest.mark.compile, id="compiled"),
    ],
)
def test_the_conformance_suite_holds_with_opened_clusters(path, checks, monkeypatch):
    # Checked shapes draw from the generator of Python.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    # Second derivatives, which the backend does not promise without probes, are right as well. Clusters of
    # more keys at more tokens would take memory that grows faster than the tokens.
    promised = replace(ea.spec("window-clusters").capabilities, second_derivatives=True)
    check_backend(built(clusters=256), capabilities=promised, only=checks)


@pytest.mark.parametrize("layer", [0, 1, 5])
def test_on_real_activations_opened_clusters_err_less_than_summaries(layer):
    q, k, v = (x.double() for x in ea.sample(layer=layer))
    exact = (q @ k.mT * 32**-0.5).softmax(dim=-1) @ v

    def error(probes):
        sizes = {"window": 32, "clusters": 32, "global_tokens": 1, "probes": probes}
        out = ea.build("window-clusters", head_dim=32, **sizes)(q, k, v)
        return float((out - exact).norm() / exact.norm())

    assert error(8) < error(4) < error(2) < error(0)
    assert error(8) < error(0) / 2


@CAUSAL
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("tokens", [1, 9, 67])
def test_operations_are_those_of_every_key_and_cluster_that_is_read(tokens, first, causal):
    keys = summaries = 0
    runs = set()
    for i in range(tokens):
        size = size_at(i, tokens, CLUSTERS, causal)
        begin = i // size * size
        near = {*range(max(begin - size, 0), min(begin + 2 * size, tokens)), *range(min(first, tokens))}
        far = sum(j < begin - size or (j >= begin + 2 * size and not causal) for j in range(0, tokens, size))
        keys += len([j for j in near if j <= i or not causal]) + min(PROBES, far) * size
        summaries += far
        runs |= {(size, run) for run in runs_at(i, tokens, size, causal) if len(run) > size}
    problem = ea.AttentionProblem(head_dim=8, causal=causal)
    options = built(causal, global_tokens=first).options
    # Without causality all runs share the directions of all keys.
    sorting = sum(len(run) for _, run in runs) if causal else tokens * bool(runs)
    assert built(causal).spec.flops(problem, options, tokens) == 2 * 8 * (
        2 * keys + 3 * summaries + 5 * 8 * sorting
    )


def test_opened_clusters_are_no_segments():
    with pytest.raises(ea.OptionError, match=r"summary='segments' .* probes=2 needs 'auto'"):
        built(summary="segments")
    with pytest.raises(ea.OptionError, match="probes is at least 0"):
        built(probes=-1)
