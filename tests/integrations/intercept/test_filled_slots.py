"""Steps over a cache of fixed length, whose mask shows the filled slots, and masks without entries."""

import math

import pytest
import torch
import torch.nn.functional as F
from intercepted_models import Called
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import efficient_attn as ea
from efficient_attn.errors import UnsupportedError

SMALL = {"window": 5, "block": 4, "num_features": 16, "blocks": 1, "k": 5}
SINKS = ("window", {"window": 5, "global_tokens": 2})
BACKENDS = {"sinks": SINKS, "by head": ("by-head", {"heads": {"1": SINKS}})}
for name in ea.list_backends():
    spec = ea.spec(name)
    if spec.capabilities.causal and not spec.composed:
        fields = spec.options_type.__dataclass_fields__
        BACKENDS[name] = (name, {option: value for option, value in SMALL.items() if option in fields})


def bias(low):
    return lambda shown: torch.zeros(shown.shape).double().masked_fill(~shown, low)


FORMS = {"bool": lambda shown: shown, "−inf": bias(-math.inf), "least": bias(torch.finfo(torch.float64).min)}


def filled_slots(backend, slots, queries, ends):
    """Queries at the ends of sequences in slots whose empty ends hold NaN, and the outputs of each alone.

    The first sequence has padding and a hole, the second fills all slots, the third begins with the queries,
    the fourth has padding behind the first query, and the last no real key.
    """
    q, k, v = torch.randn(3, 5, 4, slots, 8, generator=torch.Generator().manual_seed(slots)).double()
    k, v, real = k[:, :2], v[:, :2], torch.ones(5, slots, dtype=torch.bool)
    real[0, [0, 1, 4]], real[3, ends[3] - queries + 1 :], real[4] = False, False, False
    at = torch.tensor(ends)[:, None] - queries + torch.arange(queries)
    shown = (real[:, None] & (torch.arange(slots) <= at[..., None]))[:, None]
    last, outputs = [], []
    for row, end in enumerate(ends):
        whole = [x[row : row + 1, :, :end] for x in (q, k, v)]
        outputs.append(backend(*whole, key_mask=real[row : row + 1, :end])[:, :, -queries:])
        last.append(whole[0][:, :, -queries:])
        k[row, :, end:], v[row, :, end:] = math.nan, math.nan
    return torch.cat(last), k, v, shown, torch.cat(outputs)


@pytest.mark.parametrize("name", BACKENDS)
@torch.no_grad()
def test_steps_over_filled_slots_equal_the_whole_sequence_for_every_causal_backend(name):
    model, (backend, options) = Called(enable_gqa=True), BACKENDS[name]
    q, k, v = torch.randn(3, 2, 4, 24, 8).double()
    k, v = k[:, :2], v[:, :2]
    example = {"example": lambda: model(q, k, v, is_causal=True), "strict": True, "max_tokens": 64}
    begins = ea.spec(backend).capabilities.needs_all_queries
    with ea.attach(model, backend, **options, **example) as replaced:
        (built,) = replaced.backends.values()
        for slots in (24, 40, 64):
            for queries, (form, masked) in zip((1, 5, 11), FORMS.items(), strict=True):
                ends = [queries] * 5 if begins else [queries + 7, slots, queries, queries + 3, queries + 1]
                *step, shown, expected = filled_slots(built, slots, queries, ends)
                served = model(*step, attn_mask=masked(shown))
                assert (expected[4] == 0).all() and expected[1].abs().max() > 0.1
                torch.testing.assert_close(served, expected, rtol=0, atol=1e-6, msg=f"{slots} {form}")
        nothing = FORMS["least"](torch.zeros(2, 1, 1, 24, dtype=torch.bool))
        assert (model(q[:, :, :1], k, v, attn_mask=nothing) == 0).all()


@torch.no_grad()
def test_padding_at_the_end_moves_no_key_of_a_bidirectional_call():
    model, (q, k, v) = Called(), torch.randn(3, 2, 4, 24, 8)
    real, query = torch.arange(24) < torch.tensor([[9], [20]]), q[:, :, :1]
    with ea.attach(model, "linformer", rank=4, example=lambda: model(query, k, v), strict=True) as replaced:
        expected = replaced.backends["model"](query, k, v, key_mask=real)
        torch.testing.assert_close(model(query, k, v, attn_mask=real[:, None, None]), expected)


def test_a_call_over_filled_slots_is_captured_without_padding_and_empty_slots():
    exact, ends = ea.build("exact", head_dim=8, causal=True), [12, 40, 15, 16, 17]
    q, k, v, shown, _ = filled_slots(exact, 40, 5, ends)
    with ea.intercept.capture() as captured:
        F.scaled_dot_product_attention(q, k, v, attn_mask=shown, enable_gqa=True)
    (stored,) = captured.sites.values()
    assert torch.equal(stored.q[0], q[0]) and torch.equal(stored.k[0], k[0][:, [2, 3, *range(5, 12)]])


class Foreign(torch.Tensor):
    """A tensor whose entries its class may compute."""


NINE = torch.arange(9)
TREE = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0]]).bool()
GAPS = torch.tensor([[3], [6], [7]]) >= NINE
UNREAD = "its mask is a Foreign, whose entries are not read"
PATTERN = "its mask is no key mask and not causal"
LEFT_EXACT = {
    "branches of a tree": (TREE, PATTERN),
    "gaps between queries": (GAPS, PATTERN),
    "queries that do not see themselves": (NINE[:, None] > NINE, PATTERN),
    "a row that sees all": (torch.stack([GAPS | True, NINE[6:, None] >= NINE])[:, None], PATTERN),
    "upper left": (causal_upper_left(7, 9), "causal_upper_left aligns 7 queries with the first of 9 keys"),
    "subclass": ((NINE[2:, None] >= NINE).as_subclass(Foreign), UNREAD),
}


@pytest.mark.parametrize("name", LEFT_EXACT)
@torch.no_grad()
def test_queries_that_are_not_consecutive_and_masks_that_are_not_read_stay_exact(name):
    (mask, reason), model = LEFT_EXACT[name], Called()
    q, k, v = torch.randn(3, 2, 2, mask.shape[-1], 8)
    call = {"q": q[:, :, : mask.shape[-2]], "k": k, "v": v, "attn_mask": mask}
    expected, example = model(**call), {"example": lambda: model(q, k, v, is_causal=True)}
    with ea.attach(model, "window", window=3, **example) as replaced:
        assert torch.equal(model(**call), expected)
        assert replaced.calls == {"model": {reason: 1}}
    refused = pytest.raises(UnsupportedError, match=f"model cannot be served: {reason}")
    with ea.attach(model, "window", window=3, **example, strict=True), refused:
        model(**call)


@pytest.mark.parametrize("tokens", [64, 300, 3000])
@pytest.mark.parametrize("causal_bias", [causal_upper_left, causal_lower_right])
@torch.no_grad()
def test_a_causal_bias_is_causal_and_an_unknown_class_unread_at_all_sizes(causal_bias, tokens):
    (q, k, v), model = torch.randn(3, 1, 1, tokens, 8), Called()
    mask, step = causal_bias(tokens, tokens), causal_lower_right(7, tokens)
    expected, last = ea.attention(q, k, v, name="window", window=5, causal=True), q[:, :, -7:]
    unread = torch.empty(7, tokens).as_subclass(Foreign)
    with ea.attach(model, "window", window=5, example=lambda: model(q, k, v, attn_mask=mask)) as replaced:
        for _ in range(50):
            output = model(q, k, v, attn_mask=mask)
            model(last, k, v, attn_mask=unread)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(model(last, k, v, attn_mask=step), expected[:, :, -7:])
        assert replaced.calls == {"model": {"served": 51, UNREAD: 50}}
