"""Backends in torch's layers: every way leads through the backend, with torch's masks, and back."""

import copy
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import efficient_attn as ea
from efficient_attn.integrations.pytorch import replace_attention

DIM, HEADS, BATCH, TOKENS = 16, 4, 2, 6
OPTIONS = {
    "exact": {},
    "window": {"window": 3},
    "performer-positive": {"num_features": 8},
    "linformer": {"rank": 3, "max_tokens": TOKENS},
}


def encoder_layer(**arguments):
    return nn.TransformerEncoderLayer(DIM, HEADS, 32, batch_first=True, **{"dropout": 0.0, **arguments})


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, MEMORY = draw(BATCH, TOKENS, DIM), draw(BATCH, TOKENS, DIM, seed=2)
PADDING = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
PADDING[1, -2:] = True
LATER = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=torch.float64)


def three_ways(model, call, layers):
    """In training, in evaluation and in evaluation without gradients: as many calls, the same output."""
    calls, outputs = [], []
    for module in model.modules():
        if isinstance(module, ea.Backend):
            # On the core, below everything that torch looks at before it goes its fused path.
            forward = module.core.forward
            module.core.forward = lambda *args, forward=forward: (calls.append(1), forward(*args))[1]
    for training, context in ((True, nullcontext()), (False, nullcontext()), (False, torch.no_grad())):
        model.train(training)
        calls.clear()
        with context:
            outputs.append(call())
        assert len(calls) == layers
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("backend", OPTIONS)
@pytest.mark.parametrize("layers", [0, 3])
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_or_its_layer_calls_the_backend_whichever_way_it_runs(
    backend, padding, layers, norm_first
):
    model = encoder_layer(norm_first=norm_first)
    with warnings.catch_warnings():
        # torch says of pre-norm that it has no nested tensors.
        warnings.simplefilter("ignore", UserWarning)
        model = nn.TransformerEncoder(model, layers) if layers else model
    model.double()
    replace_attention(model, backend, **OPTIONS[backend])
    three_ways(model, lambda: model(X, src_key_padding_mask=padding), layers or 1)


@pytest.mark.parametrize("padding", [None, PADDING])
def test_a_decoder_is_causal_in_itself_and_not_towards_the_encoder(padding):
    model = nn.Transformer(DIM, HEADS, 2, 2, 32, dropout=0.0, batch_first=True).double()
    replaced = replace_attention(model, "performer-positive", num_features=8)
    causal = {
        name: backend.problem.causal
        for name, backend in zip(replaced.served, backends_of(model), strict=True)
    }
    assert [name for name in causal if causal[name]] == [f"decoder.layers.{i}.self_attn" for i in range(2)]
    assert len(causal) == 6
    # torch wants both masks of the target of one kind.
    target = None if padding is None else as_numbers(padding)
    three_ways(
        model,
        lambda: model(
            MEMORY,
            X,
            tgt_mask=LATER,
            src_key_padding_mask=padding,
            tgt_key_padding_mask=target,
            memory_key_padding_mask=padding,
        ),
        6,
    )


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("pattern", [None, LATER, LATER.mT], ids=["all keys", "causal", "another pattern"])
@pytest.mark.parametrize("backend", ["exact", "exact-dense"])
def test_exact_attention_in_the_place_of_torchs_follows_the_mask_of_each_call(backend, pattern, padding):
    model = nn.Transformer(DIM, HEADS, 1, 2, 32, dropout=0.0, batch_first=True).double()

    def output():
        # torch wants both masks of one kind.
        hidden = padding
        if pattern is not None and padding is not None:
            hidden = torch.where(padding, -torch.inf, 0.0).double()
        masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        return model(MEMORY, X, tgt_mask=pattern, tgt_key_padding_mask=hidden, **masks)

    before = output()
    replace_attention(model, backend)
    torch.testing.assert_close(output(), before, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_undoing_gives_back_the_layers_with_what_was_learned_since():
    model = nn.TransformerEncoder(encoder_layer(dropout=0.1), 2).double()
    copied = copy.deepcopy(model)
    hooked = []
    model.layers[0].self_attn.register_forward_hook(lambda *_: hooked.append(1))
    parameters = list(model.parameters())
    replaced = replace_attention(model, "linformer", dropout=0.0, **OPTIONS["linformer"])
    assert all(any(p is q for q in model.parameters()) for p in parameters)
    model(X)
    assert hooked == [1]
    with torch.no_grad():
        for p, q in zip(parameters, copied.parameters(), strict=True):
            p += 1
            q += 1
    with pytest.raises(ea.errors.OptionError, match=r"serves this layer already: undo\(\) it first"):
        replace_attention(model, "window", dropout=0.0)
    replaced.undo()
    assert list(model.state_dict()) == list(copied.state_dict())
    assert model.layers[0].self_attn.dropout == 0.1 and model.use_nested_tensor
    model.eval()
    copied.eval()
    for padding in (None, PADDING):
        with torch.no_grad():
            assert torch.equal(*(m(X, src_key_padding_mask=padding) for m in (model, copied)))


def backends_of(model):
    return [module for module in model.modules() if isinstance(module, ea.Backend)]


def test_layers_are_chosen_by_name_and_draw_each_their_own():
    model = nn.Transformer(DIM, HEADS, 2, 2, 32, dropout=0.0, batch_first=True).double()
    options = {"only": "encoder.*", "num_features": 8, "seed": 5}
    replaced = replace_attention(model, "performer-positive", **options)
    assert list(replaced.served) == [f"encoder.layers.{i}.self_attn" for i in range(2)]
    draws = [backend.core.features.projection for backend in backends_of(model)]
    assert len(draws) == 2 and not torch.equal(*draws)
    replaced.undo()
    assert not backends_of(model)
    replace_attention(model, "performer-positive", **options)
    assert all(map(torch.equal, draws, (backend.core.features.projection for backend in backends_of(model))))


def test_linformer_may_share_its_mixing_over_all_layers():
    model = nn.TransformerEncoder(encoder_layer(), 2).double()
    replace_attention(model, "linformer", sharing="layers", **OPTIONS["linformer"])
    first, second = (backend.core for backend in backends_of(model))
    assert first is second
    assert sum("mix_keys" in name for name in model.state_dict()) == 1


def attached(backend="exact", *, layer=None, **options):
    """A layer in float64 with a backend."""
    layer = (
        nn.MultiheadAttention(DIM, HEADS, batch_first=True, dtype=torch.float64) if layer is None else layer
    )
    replace_attention(layer, backend, **options)
    return layer


def as_numbers(mask):
    """What is added to scores: −inf where True hides a key, 0 elsewhere."""
    return torch.where(mask, -torch.inf, 0.0).double()


PATTERN = draw(TOKENS, TOKENS, seed=2) > 0.5
PATTERN[:, 1] = False
NUMBERS = draw(BATCH * HEADS, TOKENS, TOKENS, seed=3)
MASKS = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "pattern": {"attn_mask": PATTERN},
    "both": {"key_padding_mask": PADDING, "attn_mask": PATTERN},
    "causal": {"attn_mask": LATER, "is_causal": True},
    "causal and padding": {"attn_mask": LATER, "key_padding_mask": as_numbers(PADDING), "is_causal": True},
    "pattern of each head": {"attn_mask": NUMBERS > 1},
    "numbers": {"attn_mask": NUMBERS},
    "numbers on keys": {"key_padding_mask": draw(BATCH, TOKENS, seed=4)},
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("call", [{"need_weights": False}, {}, {"average_attn_weights": False}])
@pytest.mark.parametrize("options", [{}, {"kdim": 8, "vdim": 9, "bias": False}])
def test_exact_attention_follows_every_mask_as_torch_does_also_in_gradients(kind, call, options):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True, dtype=torch.float64, **options)
    ours = attached(layer=copy.deepcopy(theirs))
    widths = (options.get("kdim", DIM), options.get("vdim", DIM))
    inputs = (X, *(draw(BATCH, TOKENS, width, seed=width) for width in widths)) if options else (X, X, X)
    results = []
    for layer in (theirs, ours):
        out, weights = layer(*inputs, **call, **MASKS[kind])
        loss = out.square().sum() + (0.0 if weights is None else weights.square().sum())
        results.append((out, weights, *torch.autograd.grad(loss, list(layer.parameters()))))
    for actual, expected in zip(results[1], results[0], strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_backend_gets_the_heads_and_the_padding():
    layer = attached("performer-positive", num_features=6)
    rows = layer.in_proj_weight.chunk(3)
    q, k, v = ((X @ weight.mT).unflatten(-1, (HEADS, -1)).transpose(1, 2) for weight in rows)
    (backend,) = backends_of(layer)
    expected = backend(q, k, v, key_mask=~PADDING).transpose(1, 2).flatten(2) @ layer.out_proj.weight.mT
    for mask in (PADDING, as_numbers(PADDING)):
        actual = layer(X, X, X, key_padding_mask=mask, need_weights=False)[0]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_a_causal_backend_takes_the_causal_mask_in_every_form():
    layer = attached("window", window=3, causal=True)
    expected = layer(X, X, X, need_weights=False, attn_mask=LATER, is_causal=True)[0]
    for mask in (LATER, LATER < 0, LATER.expand(BATCH * HEADS, -1, -1)):
        for hint in (False, True):
            actual = layer(X, X, X, need_weights=False, attn_mask=mask, is_causal=hint)[0]
            assert torch.equal(actual, expected)


def test_what_a_backend_keeps_stays_where_a_checkpoint_of_torch_has_nothing_of_it():
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True, dtype=torch.float64)
    linformer = attached("linformer", **OPTIONS["linformer"])
    (backend,) = backends_of(linformer)
    state = copy.deepcopy(backend.state_dict())
    # Inside a model, where names have a prefix.
    nn.Sequential(linformer).load_state_dict(nn.Sequential(theirs).state_dict())
    torch.testing.assert_close(linformer.in_proj_weight, theirs.in_proj_weight)
    torch.testing.assert_close(backend.state_dict(), state)
    half = dict(linformer.state_dict())
    del half["efficient_attn.0.core.mix_keys"]
    with pytest.raises(RuntimeError, match="Missing key"):
        linformer.load_state_dict(half)


@pytest.mark.parametrize("weights", [False, True])
def test_dropout_of_exact_attention_is_torchs(weights):
    theirs = nn.MultiheadAttention(DIM, HEADS, dropout=0.5, batch_first=True, dtype=torch.float64)
    ours, outputs = attached(layer=copy.deepcopy(theirs)), []
    for layer in (theirs, ours):
        torch.manual_seed(0)
        outputs.append(layer(X, X, X, need_weights=weights)[0])
    assert torch.equal(*outputs)


class Custom(nn.MultiheadAttention):
    """Somebody's layer that computes in a way of its own."""


def translation():
    return nn.Transformer(DIM, HEADS, 1, 1, batch_first=True)


NO_DROPOUT = {"max_tokens": 8, "dropout": 0.0}
REFUSED = [
    (lambda: nn.Linear(2, 2), "exact", {}, "Linear has no nn.MultiheadAttention to replace"),
    (encoder_layer, "exact", {"only": "selfattn"}, "Did you mean 'self_attn'"),
    (lambda: encoder_layer(dropout=0.1), "window", {}, "^self_attn: Backend 'window' has no attention"),
    (
        translation,
        "linformer",
        {"rank": 4, **NO_DROPOUT},
        r"^decoder\.layers\.0\.self_attn: Backend 'linformer' cannot be",
    ),
    (translation, "window", NO_DROPOUT, r"^decoder\.layers\.0\.multihead_attn: .*: only='\*\.self_attn'"),
    (lambda: nn.ModuleList([encoder_layer(), Custom(DIM, HEADS)]), "exact", {}, "^1: Custom has its own"),
    (lambda: nn.MultiheadAttention(DIM, HEADS, add_zero_attn=True), "exact", {}, "add_zero_attn=True adds"),
    (lambda: nn.MultiheadAttention(DIM, HEADS, add_bias_kv=True), "exact", {}, "add_bias_kv=True adds a key"),
    (encoder_layer, "sdpa", {}, "Here it is 'exact'"),
    (encoder_layer, "window", {"windows": 3}, "Did you mean 'window'"),
]


@pytest.mark.parametrize(("make", "backend", "arguments", "message"), REFUSED)
def test_where_one_layer_cannot_be_replaced_none_is(make, backend, arguments, message):
    model = make()
    kinds = [type(module) for module in model.modules()]
    names = list(model.state_dict())
    with pytest.raises(ea.AttentionError, match=message):
        replace_attention(model, backend, **arguments)
    assert [type(module) for module in model.modules()] == kinds
    assert list(model.state_dict()) == names


CALLS = [
    ("window", {}, {"need_weights": True}, r"its caller asks for the weights \(pass need_weights=False\)"),
    ("window", {}, {"attn_mask": LATER}, "its causality is not that of its backend"),
    ("window", {"causal": True}, {}, "its causality is not that of its backend"),
    ("window", {"causal": True}, {"attn_mask": LATER.mT}, "its mask is no key mask and not causal"),
    ("window", {"causal": True}, {"attn_mask": NUMBERS}, "its mask is no key mask and not causal"),
    ("window", {}, {"key_padding_mask": NUMBERS[:BATCH, 0]}, "its mask is no key mask and not causal"),
]


@pytest.mark.parametrize(("backend", "options", "call", "message"), CALLS)
def test_what_a_backend_cannot_honour_is_refused_and_never_ignored(backend, options, call, message):
    layer = attached(backend, **options)
    with pytest.raises(ea.UnsupportedError, match=f"model cannot be served: {message}"):
        layer(X, X, X, **{"need_weights": False, **call})


def test_a_replaced_model_can_be_copied_and_pickled():
    model = nn.TransformerEncoder(encoder_layer(), 2).double().eval()
    replace_attention(model, "performer-positive", num_features=8)
    expected = model(X, src_key_padding_mask=PADDING)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(X, src_key_padding_mask=PADDING), expected)


@pytest.mark.compile
@pytest.mark.parametrize("padding", [None, PADDING])
def test_a_replaced_model_compiles_in_one_graph(padding):
    torch._dynamo.reset()
    model = nn.TransformerEncoder(encoder_layer(), 2).double().eval()
    replace_attention(model, "performer-positive", num_features=8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        actual, expected = (f(X, src_key_padding_mask=padding) for f in (compiled, model))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
