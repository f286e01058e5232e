"""A layer with a backend beside torch's: the same call, answer and state dict, or a refusal."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

import efficient_attn as ea
from efficient_attn.integrations.pytorch_replace import replace_attention

DIM, HEADS, BATCH, TOKENS, KEYS = 12, 3, 2, 5, 7
LATER = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


def attached(backend="exact", **options):
    """A layer in float64 with a backend."""
    layer = nn.MultiheadAttention(DIM, HEADS, dtype=torch.float64)
    replace_attention(layer, backend, **options)
    return layer


def twins(*, backend="exact", causal=None, **arguments):
    """torch's layer and ours with the same weights, none of them zero, in float64."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(DIM, HEADS, dtype=torch.float64, **arguments)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    ours = copy.deepcopy(theirs)
    replace_attention(ours, backend, causal=causal)
    return theirs, ours


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same_call(theirs, ours, inputs, **call):
    """Outputs, weights, and the gradients of inputs and parameters agree to 1e-12."""
    answers = []
    for layer in (theirs, ours):
        # What was one tensor stays one: torch goes another way then, and so do we.
        leaves = {id(x): x.clone().requires_grad_() for x in inputs}
        out, weights = layer(*(leaves[id(x)] for x in inputs), **call)
        loss = out.square().sum() + (0.0 if weights is None else weights.square().sum())
        leaves_and_parameters = [*leaves.values(), *layer.parameters()]
        answers.append((out, weights, torch.autograd.grad(loss, leaves_and_parameters)))
    (out, weights, gradients), (our_out, our_weights, our_gradients) = answers
    torch.testing.assert_close(our_out, out, rtol=0, atol=1e-12)
    assert (weights is None) == (our_weights is None)
    if weights is not None:
        torch.testing.assert_close(our_weights, weights, rtol=0, atol=1e-12)
    for ours_, theirs_ in zip(our_gradients, gradients, strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=1e-12, atol=1e-12)


def as_numbers(mask):
    """What is added to scores: −inf where True hides a key, 0 elsewhere."""
    return torch.where(mask, -torch.inf, 0.0).double()


def masks(keys, kind):
    """Padding and patterns that leave every query some key, as True for hidden or as numbers."""
    padding = torch.zeros(BATCH, keys, dtype=torch.bool)
    padding[0, -2:] = True
    pattern = draw(TOKENS, keys, seed=2) > 0.5
    pattern[:, 1] = False
    numbers = draw(BATCH * HEADS, TOKENS, keys, seed=3)
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "pattern": {"attn_mask": pattern},
        "both": {"key_padding_mask": padding, "attn_mask": pattern},
        "pattern of each head": {"attn_mask": numbers > 1},
        "numbers": {"attn_mask": numbers},
        "both in numbers": {
            "key_padding_mask": as_numbers(padding),
            "attn_mask": numbers,
        },
        "numbers on keys": {"key_padding_mask": draw(BATCH, keys, seed=4)},
    }[kind]


KINDS = ("none", "padding", "pattern", "both", "pattern of each head", "numbers", "both in numbers")


@pytest.mark.parametrize("kind", [*KINDS, "numbers on keys"])
@pytest.mark.parametrize(("weights", "average"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("backend", ["exact", "exact-dense"])
def test_every_mask_means_what_it_means_in_torch(kind, weights, average, backend):
    call = {"need_weights": weights, "average_attn_weights": average}
    for batch_first, crosses, training in product((False, True), (False, True), (False, True)):
        theirs, ours = (layer.train(training) for layer in twins(batch_first=batch_first, backend=backend))
        keys = KEYS if crosses else TOKENS
        sizes = (BATCH, TOKENS) if batch_first else (TOKENS, BATCH)
        x = draw(*sizes, DIM)
        context = draw(*((BATCH, keys) if batch_first else (keys, BATCH)), DIM, seed=5) if crosses else x
        assert_same_call(theirs, ours, [x, context, context], **call, **masks(keys, kind))


@pytest.mark.parametrize("sizes", [{"kdim": 8}, {"vdim": 9, "bias": False}, {"kdim": 8, "vdim": 9}])
def test_keys_and_values_of_other_widths(sizes):
    theirs, ours = twins(**sizes)
    widths = (DIM, sizes.get("kdim", DIM), sizes.get("vdim", DIM))
    inputs = [draw(n, BATCH, width, seed=n) for n, width in zip((TOKENS, KEYS, KEYS), widths, strict=True)]
    assert_same_call(theirs, ours, inputs)
    assert_same_call(theirs, ours, inputs, need_weights=False, **masks(KEYS, "both"))


def test_a_single_sequence_needs_no_batch():
    theirs, ours = twins(batch_first=True)
    x, padding = draw(TOKENS, DIM), torch.tensor([False, True, False, False, True])
    for weights in (True, False):
        assert_same_call(theirs, ours, [x] * 3, need_weights=weights, key_padding_mask=padding)
        assert_same_call(theirs, ours, [x] * 3, need_weights=weights, average_attn_weights=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_causal_calls(causal, weights, padded):
    theirs, ours = twins(batch_first=True, causal=causal)
    x = draw(BATCH, TOKENS, DIM)
    hidden = masks(TOKENS, "padding")["key_padding_mask"]
    for numbers, hint in product((False, True), (False, True)):
        # torch wants both masks of one kind.
        mask, padding = (as_numbers(m) if numbers else m for m in (LATER, hidden))
        call = {"key_padding_mask": padding} if padded else {}
        call |= {"attn_mask": mask, "is_causal": hint, "need_weights": weights}
        assert_same_call(theirs, ours, [x] * 3, **call)
    call = {"attn_mask": as_numbers(LATER), "is_causal": True, **masks(TOKENS, "numbers on keys")}
    assert_same_call(theirs, ours, [x] * 3, need_weights=weights, **call)
    if weights or padded:
        # torch then reads the mask, whatever the hint.
        call = {**masks(TOKENS, "both" if padded else "pattern"), "is_causal": True, "need_weights": weights}
        assert_same_call(*twins(batch_first=True), [x] * 3, **call)
    # The mask may be left out, which torch refuses.
    torch.testing.assert_close(
        ours(x, x, x, is_causal=True, need_weights=weights)[0],
        theirs(x, x, x, attn_mask=LATER)[0],
        rtol=0,
        atol=1e-12,
    )


def test_what_a_backend_keeps_stays_where_a_checkpoint_of_torch_has_nothing_of_it():
    theirs, _ = twins()
    linformer = attached("linformer", rank=2, max_tokens=TOKENS)
    state = copy.deepcopy(linformer.backend.state_dict())
    # Inside a model, where names have a prefix.
    nn.Sequential(linformer).load_state_dict(nn.Sequential(theirs).state_dict())
    torch.testing.assert_close(linformer.in_proj_weight, theirs.in_proj_weight)
    torch.testing.assert_close(linformer.backend.state_dict(), state)
    half = dict(linformer.state_dict())
    del half["backend.core.mix_keys"]
    with pytest.raises(RuntimeError, match="Missing key"):
        linformer.load_state_dict(half)


def test_a_backend_gets_the_heads_and_the_padding():
    layer = attached("performer-positive", num_features=6)
    x, padding = draw(TOKENS, BATCH, DIM), masks(TOKENS, "padding")["key_padding_mask"]
    rows = layer.in_proj_weight.chunk(3)
    q, k, v = ((x @ weight.mT).unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3) for weight in rows)
    heads = layer.backend(q, k, v, key_mask=~padding)
    expected = heads.permute(2, 0, 1, 3).flatten(2) @ layer.out_proj.weight.mT
    for mask in (padding, as_numbers(padding)):
        actual = layer(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_a_causal_backend_takes_the_causal_mask_in_every_form():
    layer = attached("window", window=3, causal=True)
    x = draw(TOKENS, BATCH, DIM)
    expected = layer(x, x, x, need_weights=False, is_causal=True)[0]
    for mask in (LATER, as_numbers(LATER), LATER.expand(BATCH * HEADS, -1, -1)):
        for hint in (False, True):
            actual = layer(x, x, x, need_weights=False, attn_mask=mask, is_causal=hint)[0]
            assert torch.equal(actual, expected)


def test_rows_that_may_read_nothing_give_zeros_before_the_output_projection():
    _, ours = twins(batch_first=True)
    x = draw(BATCH, TOKENS, DIM).requires_grad_()
    everything = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    everything[0] = True
    nothing = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    for call in ({"key_padding_mask": everything}, {"attn_mask": nothing}):
        for weights in (True, False):
            out = ours(x, x, x, need_weights=weights, **call)[0]
            torch.testing.assert_close(out[0], ours.out_proj.bias.expand_as(out[0]), rtol=0, atol=1e-12)
            assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


def test_padding_may_hold_anything():
    _, ours = twins(batch_first=True)
    x, call = draw(BATCH, TOKENS, DIM), masks(TOKENS, "both")
    broken = x.clone()
    broken[0, -2:] = torch.nan
    for weights in (True, False):
        for mask in (call, {"key_padding_mask": call["key_padding_mask"]}):
            expected, actual = (ours(y, y, y, need_weights=weights, **mask)[0] for y in (x, broken))
            assert torch.equal(actual[0, :-2], expected[0, :-2]) and torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("call", [{}, {"need_weights": False}, {"need_weights": False, "attn_mask": LATER}])
def test_dropout_is_of_weights_and_of_training(call):
    theirs, ours = twins(dropout=0.5, batch_first=True)
    x = draw(BATCH, TOKENS, DIM)
    assert_same_call(theirs.eval(), ours.eval(), [x] * 3, **call)
    ours.train()
    torch.manual_seed(0)
    draws = torch.stack([ours(x, x, x, **call)[0] for _ in range(400)])
    assert not torch.equal(draws[0], draws[1])
    # Unbiased: within six standard errors of the mean of the draws.
    off = (draws.mean(dim=0) - theirs(x, x, x, **call)[0]).abs()
    assert (off <= 6 * draws.std(dim=0) / 400**0.5 + 1e-12).all()


@pytest.mark.parametrize("weights", [False, True])
def test_autocast_rounds_as_torch_rounds(weights):
    theirs, ours = (layer.float() for layer in twins())
    x = draw(TOKENS, BATCH, DIM).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = (layer(x, x, x, need_weights=weights) for layer in (theirs, ours))
    assert (actual[1] is None) == (expected[1] is None)
    # One rounding to 8 bits of each of the largest entries, where sums are taken in another order.
    for ours_, theirs_ in zip(actual[: 1 + weights], expected[: 1 + weights], strict=True):
        assert ours_.dtype is theirs_.dtype
        assert (ours_ - theirs_).abs().max() <= 2**-7 * theirs_.abs().max()


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["exact", "performer-positive", "window"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", [None, torch.bool, torch.float64])
def test_it_compiles_in_one_graph(backend, causal, padding):
    torch._dynamo.reset()
    layer = attached(backend, causal=causal)
    x, mask = draw(TOKENS, BATCH, DIM), masks(TOKENS, "padding")["key_padding_mask"]
    call = {"need_weights": False}
    if causal:
        call |= {"is_causal": True, "attn_mask": LATER}
    if padding is not None:
        call["key_padding_mask"] = mask if padding is torch.bool else as_numbers(mask)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, x, x, **call)[0], layer(x, x, x, **call)[0], rtol=0, atol=1e-12)


@pytest.mark.compile
def test_compiled_code_takes_no_other_numbers_for_padding():
    torch._dynamo.reset()
    layer = attached("window")
    x = draw(TOKENS, BATCH, DIM)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="key_padding_mask has entries other than 0 and -inf"):
        compiled(x, x, x, need_weights=False, key_padding_mask=draw(BATCH, TOKENS))


NUMBERS = draw(BATCH * HEADS, TOKENS, TOKENS)
REFUSED_WHEN_CALLED = [
    ({}, {"need_weights": True}, "pass need_weights=False"),
    ({}, {"attn_mask": LATER}, "supports no attn_mask: use causal=True for the causal mask"),
    ({}, {"is_causal": True}, "built with causal=False, and backend 'window' supports no attn_mask"),
    ({"causal": True}, {}, "is not causal: pass is_causal=True"),
    (
        {"causal": True},
        {"attn_mask": LATER.mT},
        "not the causal mask, and backend 'window' supports no other",
    ),
    ({"causal": True}, {"attn_mask": NUMBERS}, "not the causal mask.*use backend='exact'"),
    ({}, {"key_padding_mask": NUMBERS[:BATCH, 0]}, "has entries other than 0.*or use backend='exact'"),
    ({}, {"key_padding_mask": LATER}, r"key_padding_mask has shape \[5, 5\].*here \[2, 5\]"),
    ({}, {"key_padding_mask": LATER[:BATCH].int()}, "key_padding_mask is torch.int32; expected bool"),
    ({"backend": "exact"}, {"attn_mask": LATER[:2]}, r"attn_mask has shape \[2, 5\]"),
    ({"backend": "exact"}, {"attn_mask": "causal"}, "attn_mask is a torch tensor"),
]


@pytest.mark.parametrize(("arguments", "call", "message"), REFUSED_WHEN_CALLED)
def test_what_a_backend_cannot_honour_is_refused_and_never_ignored(arguments, call, message):
    layer = attached(**{"backend": "window", **arguments})
    x = draw(TOKENS, BATCH, DIM)
    with pytest.raises(ea.AttentionError, match=message):
        layer(x, x, x, **{"need_weights": False, **call})


def test_inputs_that_do_not_fit_are_refused_by_name():
    layer = attached()
    x, longer = draw(TOKENS, BATCH, DIM), draw(KEYS, BATCH, DIM)
    for inputs, message in (
        ((x[..., 1:], x, x), r"query has shape \[5, 2, 11\].*\[tokens, batch, dim\].*dim=12"),
        ((x, x[0], x), r"key has shape \[2, 12\]"),
        ((x, x, longer), r"key has shape \[5, 2, 12\] and value \[7, 2, 12\]"),
        ((x.long(), x, x), "query is torch.int64"),
    ):
        with pytest.raises(ea.AttentionError, match=message):
            layer(*inputs)
    with pytest.raises(ea.ShapeError, match="is_causal is ambiguous"):
        layer(x, longer, longer, is_causal=True)
    layer.dropout = 0.5
    with pytest.raises(ea.UnsupportedError, match=r"dropout is 0\.5 and the backend was built with 0\.0"):
        layer(x, x, x)
