"""Near keys one by one, far keys by cluster: the definition, its limits, what is read, and decoding."""

from dataclasses import asdict
from itertools import pairwise

import pytest
import torch
from launches import Entering
from reference import largest_difference, random_mask, random_qkv, reference_attention
from written_out import CLUSTERS, PROBES, SCALE, WINDOW, closed, near_of, opened, runs_at, size_at

import efficient_attn as ea
from efficient_attn.measure.variants import select
from efficient_attn.ops.clusters import closed as closed_clusters
from efficient_attn.ops.clusters import probing, slices

CAUSAL = pytest.mark.parametrize("causal", [False, True])
PATHS = pytest.mark.usefixtures("path")
CLOSED = [{}, {"global_tokens": 3}]
OPENED = [{"probes": PROBES}, {"probes": PROBES, "global_tokens": 3}]
# Fewest clusters of causal queries, and an odd number.
NUMBERS = [{"probes": 1, "clusters": clusters} for clusters in (2, 7)]
KINDS = pytest.mark.parametrize(
    ("causal", "options"),
    [(False, options) for options in CLOSED + OPENED + NUMBERS]
    + [(True, options) for options in OPENED + NUMBERS],
)


@pytest.fixture(autouse=True)
def several_groups(monkeypatch):
    """A step of the CPU takes three blocks, so that short sequences have several."""
    monkeypatch.setattr(closed_clusters, "_MOST", 3)


def built(causal=False, **options):
    sizes = {"clusters": CLUSTERS if options.get("probes") else 3, "global_tokens": 0, **options}
    return ea.build("window-clusters", head_dim=8, causal=causal, window=WINDOW, **sizes)


def definition(q, k, v, *, causal, global_tokens=0, **options):
    """Output of every head of a sequence without padding."""
    by_head = (
        (q[0, head], *(x[0, head * x.shape[1] // q.shape[1]] for x in (k, v))) for head in range(q.shape[1])
    )
    if "probes" in options:
        rows = [opened(*head, causal=causal, first=global_tokens, **options) for head in by_head]
    else:
        rows = [closed(*head, first=global_tokens, **options) for head in by_head]
    return torch.stack(rows)[None]


@PATHS
@KINDS
@pytest.mark.parametrize("tokens", [1, 24, 67])
def test_outputs_and_gradients_are_those_of_the_definition(tokens, causal, options):
    q, k, v = (x.requires_grad_() for x in random_qkv(1, 4, 2, tokens, tokens))
    pair = built(causal, **options)(q, k, v), definition(q, k, v, causal=causal, **options)
    # A gradient adds up to 67 rows, each with the rounding of a few products.
    assert largest_difference(*pair, (q, k, v)) <= 1e-11


@PATHS
@KINDS
def test_padding_in_front_and_behind_is_as_if_it_were_not_there(causal, options):
    # The padding behind is long enough for clusters of a third size, which no entry has without it.
    q, k, v = random_qkv(3, 2, 2, 150, 150)
    mask = torch.arange(150) >= torch.tensor([[3], [0], [20]])
    mask &= torch.arange(150) < torch.tensor([[65], [30], [67]])
    backend = built(causal, **options)
    out = backend(q, k, v, key_mask=mask)
    for entry, (low, high) in enumerate([(3, 65), (0, 30), (20, 67)]):
        alone = backend(*(x[entry : entry + 1, :, low:high] for x in (q, k, v)))[0]
        assert (out[entry, :, low:high] - alone).abs().max() <= 1e-12


# One head of keys, or some rows of a block, in a step.
@PATHS
@CAUSAL
@pytest.mark.parametrize(("module", "limit", "size"), [(slices, "_HEADS", 67 * 2 * 8), (probing, "_ROWS", 3)])
def test_steps_of_any_size_have_the_same_output(module, limit, size, causal, monkeypatch):
    q, k, v = (x.requires_grad_() for x in random_qkv(2, 6, 3, 67, 67))
    mask = torch.arange(67) >= torch.tensor([[3], [0]])
    backend = built(causal, probes=PROBES, global_tokens=3)
    expected = backend(q, k, v, key_mask=mask)
    monkeypatch.setattr(module, limit, size)
    assert largest_difference(backend(q, k, v, key_mask=mask), expected, (q, k, v)) <= 1e-12


@PATHS
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("causal", "options"),
    [
        (False, {"clusters": 67}),
        (False, {"global_tokens": 67}),
        (False, {"probes": CLUSTERS, "global_tokens": 2}),
        (True, {"probes": CLUSTERS, "global_tokens": 2}),
        (True, {"probes": 1, "global_tokens": 67}),
    ],
)
def test_reading_every_key_by_itself_is_exact_attention(causal, options, masked):
    for queries in (67, 9) if causal else (67,):
        q, k, v = random_qkv(2, 4, 2, queries, 67)
        mask = random_mask(2, 67) if masked else None
        expected = reference_attention(q, k, v, scale=SCALE, causal=causal, key_mask=mask)
        assert (built(causal, **options)(q, k, v, key_mask=mask) - expected).abs().max() <= 1e-12


def relative_error(name, q, k, v, **options):
    exact = (q @ k.mT * 32**-0.5).softmax(dim=-1) @ v
    return float((ea.build(name, head_dim=32, **options)(q, k, v) - exact).norm() / exact.norm())


# Theory's figures for 65 keys and 64 clusters on another text, .28 and .25, with .04 for the other text.
@torch.no_grad()
@pytest.mark.parametrize(("layer", "most"), [(0, 0.28), (1, 0.25), (5, 0.18 + 0.04)])
def test_on_real_activations_more_clusters_near_keys_and_probes_err_less(layer, most):
    activations = [x.double() for x in ea.sample(layer=layer)]

    def error(name="window-clusters", **options):
        return relative_error(name, *activations, **options)

    closed_error = error(window=64, clusters=64)
    assert closed_error <= most
    assert closed_error < error("window", window=129)
    assert closed_error < error("linformer", rank=129, max_tokens=activations[1].shape[2])
    assert closed_error < error(window=64, clusters=32)
    assert closed_error < error(window=32, clusters=64)
    probed = [error(window=32, clusters=32, global_tokens=1, probes=probes) for probes in (0, 2, 4, 8)]
    assert probed == sorted(probed, reverse=True) and probed[-1] < probed[0] / 2


@pytest.mark.parametrize("first", [0, 3, 11])
@pytest.mark.parametrize("tokens", [1, 9, 67])
def test_operations_are_those_of_every_key_and_summary_that_is_read(tokens, first):
    clusters = min(CLUSTERS, tokens)
    pairs = sum(len({*near_of(i, tokens), *range(min(first, tokens))}) + clusters for i in range(tokens))
    spec = ea.spec("window-clusters")
    options = spec.options_type(window=WINDOW, clusters=CLUSTERS, global_tokens=first)
    choosing = tokens * 8 * (clusters + 1)
    assert spec.flops(ea.AttentionProblem(head_dim=8), options, tokens) == 2 * (pairs * 16 + choosing)


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
    backend = built(causal, probes=PROBES, global_tokens=first)
    # Without causality all runs share the directions of all keys.
    sorting = sum(len(run) for _, run in runs) if causal else tokens * bool(runs)
    assert backend.spec.flops(problem, backend.options, tokens) == 2 * 8 * (
        2 * keys + 3 * summaries + 5 * 8 * sorting
    )


@pytest.mark.parametrize(
    ("causal", "options", "expected"),
    [
        (False, {"probes": 0}, {"window": 64, "probes": None, "global_tokens": 0}),
        (False, {"probes": 8}, {"window": 64, "probes": 8, "global_tokens": 4}),
        (True, {}, {"window": 128, "probes": 4, "global_tokens": 4}),
        (True, {"window": 64, "global_tokens": 0}, {"window": 64, "probes": 4, "global_tokens": 0}),
    ],
)
def test_clusters_are_opened_by_default_where_causal_and_what_is_built_and_recorded_says_so(
    causal, options, expected
):
    backend = ea.build("window-clusters", head_dim=8, causal=causal, **options)
    assert {name: getattr(backend.options, name) for name in expected} == expected
    same = ea.build("window-clusters", head_dim=8, causal=causal, **asdict(backend.options))
    assert same.options == backend.options
    (variant,) = select(["window-clusters"], {"window-clusters": {k: [v] for k, v in options.items()}})
    sizes = {"tokens": 8, "num_heads": 1, "head_dim": 8, "dtype": "float32", "device": "cpu", "threads": 1}
    recorded = variant.case(kind="time", causal=causal, **sizes).options
    # Older records have no option probes where nothing is opened.
    assert {name: recorded.get(name) for name in expected} == expected
    assert ("probes" in recorded) == (expected["probes"] is not None)


TOKENS = 67
SPLITS = {
    "threes": [*range(0, TOKENS, 3), TOKENS],
    # Calls of more tokens than a block has leave no runs behind.
    "few and many": [0, 1, 4, 30, 31, 33, 34, 60, 60, TOKENS],
    "one by one": [*range(TOKENS + 1)],
}
MASKS = {
    "none": None,
    "ragged": (torch.arange(TOKENS) >= torch.tensor([[3], [40]])) & (torch.arange(TOKENS) % 7 != 5),
    # Clusters without a real key.
    "gap": (torch.arange(TOKENS) < 12) | (torch.arange(TOKENS) >= torch.tensor([[40], [28]])),
    "late": torch.arange(TOKENS) >= torch.tensor([[TOKENS], [20]]),
}


def causal(probes=2, **options):
    return built(True, probes=probes, **{"clusters": 6, "global_tokens": 3, **options})


def in_calls(backend, inputs, mask, cuts, state=None):
    """Output of some calls, and the state after them."""
    outs = []
    for begin, end in pairwise(cuts):
        new = [x[:, :, begin:end] for x in inputs]
        out, state = backend.extend(*new, state, key_mask=None if mask is None else mask[:, begin:end])
        outs.append(out)
    return torch.cat(outs, dim=2), state


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("split", "masked", "probes", "first"),
    [
        *[("few and many", "none", 2, 3), ("threes", "none", 1, 3), ("threes", "none", 6, 0)],
        *[("few and many", "ragged", 2, 3), ("few and many", "gap", 6, 3), ("one by one", "late", 2, 0)],
    ],
)
def test_any_split_into_calls_is_the_full_pass(split, masked, probes, first):
    backend = causal(probes, global_tokens=first)
    inputs, mask = random_qkv(2, 4, 2, TOKENS, TOKENS), MASKS[masked]
    out, _ = in_calls(backend, inputs, mask, SPLITS[split])
    assert (out - backend(*inputs, key_mask=mask)).abs().max() <= 1e-12


def test_calls_of_few_tokens_copy_no_more_than_the_cache():
    class Largest(Entering):
        numbers = 0

        def seen(self, name, func, args, kwargs):
            out = func(*args, **kwargs)
            if isinstance(out, torch.Tensor) and not func.is_view and out.is_floating_point():
                self.numbers = max(self.numbers, out.numel())
            return out

    # A second step, since the first one sorts, and appends to a buffer of its own.
    backend, inputs = causal(clusters=32), random_qkv(1, 4, 2, 530, 530)
    for end, share in ((515, 1 / 4), (530, 1)):
        _, state = in_calls(backend, inputs, None, [0, 513, 514])
        with Largest() as largest:
            in_calls(backend, inputs, None, [514, end], state)
        assert largest.numbers <= share * state.k.numel()


def test_padding_alone_is_streamed_with_gradients_of_zero():
    backend = ea.build("window-clusters", head_dim=4, causal=True)
    q, k, v = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3))
    out, _ = backend.extend(q, k, v, key_mask=torch.zeros(1, 3, dtype=torch.bool))
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert not gradient.any()
