"""Incremental decoding with opened clusters: any split into calls gives the output of the full pass."""

from itertools import pairwise

import pytest
import torch
from launches import Entering
from reference import random_qkv

import efficient_attn as ea
from efficient_attn.ops.clusters import decoding

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


def built(probes=2, **options):
    sizes = {"window": 8, "clusters": 6, "global_tokens": 3, **options}
    return ea.build("window-clusters", head_dim=8, causal=True, probes=probes, **sizes)


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
    backend = built(probes, global_tokens=first)
    inputs, mask = random_qkv(2, 4, 2, TOKENS, TOKENS), MASKS[masked]
    out, _ = in_calls(backend, inputs, mask, SPLITS[split])
    assert (out - backend(*inputs, key_mask=mask)).abs().max() <= 1e-12


def test_a_selected_entry_goes_on_alone():
    inputs, mask, backend = random_qkv(2, 4, 2, TOKENS, TOKENS), MASKS["ragged"], built()
    _, state = in_calls(backend, inputs, mask, [0, 10, 60, 61])
    for entry in ([0], [1], [1, 0]):
        part = [x[entry] for x in inputs]
        out, _ = in_calls(
            backend, part, mask[entry], [61, 63, TOKENS], type(state)(*(x[entry] for x in state))
        )
        assert (out - backend(*part, key_mask=mask[entry])[:, :, 61:]).abs().max() <= 1e-12


def test_a_key_is_sorted_once_for_every_length_of_a_run_that_it_lies_in(monkeypatch):
    sorted_keys, sort = [], decoding.sort_runs

    def counting(k, *rest):
        sorted_keys.append(k.shape[2])
        return sort(k, *rest)

    monkeypatch.setattr(decoding, "sort_runs", counting)
    in_calls(built(clusters=64), random_qkv(1, 2, 1, 72, 72), None, range(73))
    # 16 blocks of 4 keys lie before the last slice: number m ends runs of 1, 2, … 2^l blocks, of which the
    # longest is sorted.
    assert sum(sorted_keys) == sum(4 * (m & -m) for m in range(1, 17))


def test_calls_of_few_tokens_copy_no_more_than_the_cache():
    class Largest(Entering):
        numbers = 0

        def seen(self, name, func, args, kwargs):
            out = func(*args, **kwargs)
            if isinstance(out, torch.Tensor) and not func.is_view and out.is_floating_point():
                self.numbers = max(self.numbers, out.numel())
            return out

    # A second step, since the first one sorts, and appends to a buffer of its own.
    backend, inputs = built(clusters=32), random_qkv(1, 4, 2, 530, 530)
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
