"""Backends in torch's layers, with torch's masks, and back; `ea.attach` finds the way into any model."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from integrations.intercepted import padded_encoder, written_model
from torch import nn

import efficient_attn as ea
from efficient_attn.errors import OptionError
from efficient_attn.integrations.intercept.installed import ReplacedSites
from efficient_attn.integrations.pytorch import replace_attention

DIM, HEADS, BATCH, TOKENS = 16, 4, 2, 6
LINFORMER = {"rank": 3, "max_tokens": TOKENS}


def encoder_layer(**arguments):
    return nn.TransformerEncoderLayer(DIM, HEADS, 32, batch_first=True, **{"dropout": 0.0, **arguments})


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, MEMORY = draw(BATCH, TOKENS, DIM), draw(BATCH, TOKENS, DIM, seed=2)
PADDING = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
PADDING[1, -2:] = True
LATER = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=torch.float64)


def encoder(**arguments):
    return nn.TransformerEncoder(encoder_layer(**arguments), 3)


def transformer():
    return nn.Transformer(DIM, HEADS, 2, 2, 32, dropout=0.0, batch_first=True)


def encoded(model, padding):
    return model(X, src_key_padding_mask=padding)


def decoded(model, padding):
    # torch wants both masks of the target of one kind.
    target = None if padding is None else as_numbers(padding)
    masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    return model(MEMORY, X, tgt_mask=LATER, tgt_key_padding_mask=target, **masks)


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize(
    ("make", "call", "calls"),
    [
        (encoder_layer, encoded, 1),
        (lambda: encoder_layer(norm_first=True), encoded, 1),
        (encoder, encoded, 3),
        (lambda: encoder(norm_first=True), encoded, 3),
        (transformer, decoded, 6),
    ],
)
def test_the_backend_is_called_in_training_in_evaluation_and_without_gradients(
    make, call, calls, padding, counted
):
    with warnings.catch_warnings():
        # torch says of pre-norm that it has no nested tensors.
        warnings.simplefilter("ignore", UserWarning)
        model = make().double()
    replace_attention(model, "performer-positive", num_features=8)
    outputs = []
    for training, context in ((True, nullcontext()), (False, nullcontext()), (False, torch.no_grad())):
        model.train(training)
        counted.clear()
        with context:
            outputs.append(call(model, padding))
        assert len(counted) == calls
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=1e-12)


def test_a_decoder_is_causal_in_itself_and_not_towards_the_encoder():
    model = transformer().double()
    replaced = replace_attention(model, "performer-positive", num_features=8)
    causal = {
        name: backend.problem.causal
        for name, backend in zip(replaced.served, backends_of(model), strict=True)
    }
    assert [name for name in causal if causal[name]] == [f"decoder.layers.{i}.self_attn" for i in range(2)]
    assert len(causal) == 6


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@torch.no_grad()
def test_undoing_gives_back_the_layers_with_what_was_learned_since():
    model = encoder(dropout=0.1).double()
    copied, hooked, parameters = copy.deepcopy(model), [], list(model.parameters())
    model.layers[0].self_attn.register_forward_hook(lambda *_: hooked.append(1))
    replaced = replace_attention(model, "linformer", dropout=0.0, **LINFORMER)
    assert {*parameters} <= {*model.parameters()}
    model(X)
    assert hooked == [1]
    for parameter in (*parameters, *copied.parameters()):
        parameter += 1
    with pytest.raises(ea.errors.OptionError, match=r"serves this layer already: undo\(\) it first"):
        replace_attention(model, "window", dropout=0.0)
    replaced.undo()
    assert list(model.state_dict()) == list(copied.state_dict())
    assert model.layers[0].self_attn.dropout == 0.1 and model.use_nested_tensor
    model.eval()
    copied.eval()
    for padding in (None, PADDING):
        assert torch.equal(*(encoded(module, padding) for module in (model, copied)))


def backends_of(model):
    return [module for module in model.modules() if isinstance(module, ea.Backend)]


def test_layers_are_chosen_by_name_and_draw_each_their_own():
    model = transformer().double()
    options, draws = {"only": "encoder.*", "num_features": 8, "seed": 5}, []
    for _ in range(2):
        with replace_attention(model, "performer-positive", **options) as replaced:
            assert list(replaced.served) == [f"encoder.layers.{i}.self_attn" for i in range(2)]
            draws.append([backend.core.features.projection for backend in backends_of(model)])
    assert not torch.equal(*draws[0]) and all(map(torch.equal, *draws))


def torch_layer(**options):
    return nn.MultiheadAttention(DIM, HEADS, batch_first=True, dtype=torch.float64, **options)


def attached(backend="exact", *, layer=None, **options):
    """A layer in float64 with a backend."""
    layer = torch_layer() if layer is None else layer
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
    "padding and pattern": {"key_padding_mask": PADDING, "attn_mask": PATTERN},
    "causal": {"attn_mask": LATER, "is_causal": True},
    "causal and padding": {"attn_mask": LATER, "key_padding_mask": as_numbers(PADDING), "is_causal": True},
    "pattern of each head": {"attn_mask": NUMBERS > 1},
    "numbers on keys": {"key_padding_mask": NUMBERS[:BATCH, 0]},
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    ("call", "options"),
    [
        ({"need_weights": False}, {"dropout": 0.5}),
        ({"need_weights": False}, {"kdim": 8, "vdim": 9, "bias": False}),
        ({"average_attn_weights": False}, {}),
    ],
)
def test_exact_attention_follows_every_mask_as_torch_does_also_in_gradients(kind, call, options):
    torch.manual_seed(0)
    theirs = torch_layer(**options)
    ours = attached(layer=copy.deepcopy(theirs))
    widths = (options.get("kdim", DIM), options.get("vdim", DIM))
    inputs = (X, *(draw(BATCH, TOKENS, width, seed=width) for width in widths))
    results = []
    for layer in (theirs, ours):
        torch.manual_seed(0)
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


def test_what_a_backend_keeps_stays_where_a_checkpoint_of_torch_has_nothing_of_it():
    theirs = torch_layer()
    linformer = attached("linformer", **LINFORMER)
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


def custom_layer():
    return type("Custom", (nn.MultiheadAttention,), {})(DIM, HEADS)


@pytest.mark.parametrize(
    ("make", "backend", "options", "message"),
    [
        (lambda: nn.Linear(2, 2), "exact", {}, "Linear has no nn.MultiheadAttention to replace"),
        (encoder_layer, "exact", {"only": "selfattn"}, "Did you mean 'self_attn'"),
        (lambda: encoder_layer(dropout=0.1), "window", {}, "^self_attn: Backend 'window' has no attention"),
        (transformer, "linformer", LINFORMER, r"^decoder\.layers\.0\.self_attn: Backend 'linformer' cannot"),
        (transformer, "window", {}, r"^decoder\.layers\.0\.multihead_attn: .*: only='\*\.self_attn'"),
        (lambda: nn.ModuleList([encoder_layer(), custom_layer()]), "exact", {}, "^1: Custom has its own"),
        (lambda: torch_layer(add_zero_attn=True), "exact", {}, "add_zero_attn=True adds"),
        (lambda: torch_layer(add_bias_kv=True), "exact", {}, "add_bias_kv=True adds a key"),
    ],
)
def test_where_one_layer_cannot_be_replaced_none_is(make, backend, options, message):
    model = make()
    kinds = [type(module) for module in model.modules()]
    names = list(model.state_dict())
    with pytest.raises(ea.AttentionError, match=message):
        replace_attention(model, backend, **options)
    assert [type(module) for module in model.modules()] == kinds
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({}, {"need_weights": True}, r"its caller asks for the weights \(pass need_weights=False\)"),
        ({}, {"attn_mask": LATER}, "its causality is not that of its backend"),
        ({"causal": True}, {}, "its causality is not that of its backend"),
        ({"causal": True}, {"attn_mask": LATER.mT}, "its mask is no key mask and not causal"),
        ({}, {"key_padding_mask": NUMBERS[:BATCH, 0]}, "its mask is no key mask and not causal"),
    ],
)
def test_what_a_backend_cannot_honour_is_refused_and_never_ignored(options, call, message):
    layer = attached("window", **options)
    with pytest.raises(ea.UnsupportedError, match=f"model cannot be served: {message}"):
        layer(X, X, X, **{"need_weights": False, **call})


@torch.no_grad()
def test_models_of_torch_are_attached_by_their_layers_or_by_an_example_and_restored(counted):
    model, run = padded_encoder()
    written, run_written = written_model()
    for module, call, example in ((model, run, None), (model, run, run), (written, run_written, run_written)):
        expected, options = call(), {} if example is None else {"example": example}
        replaced = ea.attach(module, "window", window=3, **options)
        counted.clear()
        assert not torch.allclose(call(), expected)
        assert isinstance(replaced, ReplacedSites) and [name for name, _ in counted] == ["window", "window"]
        replaced.undo()
        torch.testing.assert_close(call(), expected)


def test_models_of_transformers_and_modules_around_them_are_attached_by_layer(counted):
    pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")
    from integrations.hf_models import bert, inputs

    model = bert()
    for module in (model, nn.ModuleDict({"model": model})):
        counted.clear()
        assert ea.attach(module, {"0-1": "window"}) is module
        model(**inputs())
        assert [name for name, _ in counted] == ["window", "window", "exact"]
    with pytest.raises(OptionError, match="a transformers model is attached without one"):
        ea.attach(model, "window", example=lambda: model(**inputs()))
    with pytest.raises(OptionError, match=r"Linear is no transformers model .* give example=lambda"):
        ea.attach(nn.Linear(2, 2), "window")
