"""`replace_attention`: every way through torch's own layers leads through the backend, and back."""

import copy
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import efficient_attn as ea
from efficient_attn.integrations.pytorch_replace import replace_attention

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
    causal = {name: layer.backend.problem.causal for name, layer in replaced.layers.items()}
    assert [name for name in causal if causal[name]] == [f"decoder.layers.{i}.self_attn" for i in range(2)]
    assert len(causal) == 6
    three_ways(
        model,
        lambda: model(
            MEMORY,
            X,
            tgt_mask=LATER,
            src_key_padding_mask=padding,
            tgt_key_padding_mask=padding,
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
    again = replace_attention(model, "window", window=3)
    again.undo()
    assert {layer.backend.spec.name for layer in replaced.layers.values()} == {"linformer"}
    replaced.undo()
    assert list(model.state_dict()) == list(copied.state_dict())
    assert [type(m) for m in model.modules()] == [type(m) for m in copied.modules()]
    assert model.layers[0].self_attn.dropout == 0.1 and model.use_nested_tensor
    model.eval()
    copied.eval()
    for padding in (None, PADDING):
        with torch.no_grad():
            assert torch.equal(*(m(X, src_key_padding_mask=padding) for m in (model, copied)))


def test_layers_are_chosen_by_name_and_draw_each_their_own():
    model = nn.Transformer(DIM, HEADS, 2, 2, 32, dropout=0.0, batch_first=True).double()
    replaced = replace_attention(model, "performer-positive", only="encoder.*", num_features=8, seed=5)
    assert list(replaced.layers) == [f"encoder.layers.{i}.self_attn" for i in range(2)]
    draws = [layer.backend.core.features.projection for layer in replaced.layers.values()]
    assert not torch.equal(*draws)
    again = replace_attention(
        copy.deepcopy(model), "performer-positive", only="encoder.*", num_features=8, seed=5
    )
    assert all(
        map(torch.equal, draws, (layer.backend.core.features.projection for layer in again.layers.values()))
    )
    assert type(model.decoder.layers[0].self_attn) is nn.MultiheadAttention


def test_a_model_may_be_a_single_causal_layer():
    layer = nn.MultiheadAttention(DIM, HEADS, batch_first=True, dtype=torch.float64)
    replace_attention(layer, "window", window=2, causal=True)
    out, weights = layer(X, X, X, attn_mask=LATER, need_weights=False)
    assert out.shape == X.shape and weights is None


def test_linformer_may_share_its_mixing_over_all_layers():
    model = nn.TransformerEncoder(encoder_layer(), 2).double()
    replaced = replace_attention(model, "linformer", sharing="layers", **OPTIONS["linformer"])
    first, second = (layer.backend.core for layer in replaced.layers.values())
    assert first is second
    assert sum("mix_keys" in name for name in model.state_dict()) == 1


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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_call_that_the_replaced_layer_cannot_honour_is_refused():
    layer = encoder_layer().double()
    replace_attention(layer, "window", window=3)
    with pytest.raises(
        ea.UnsupportedError, match="supports no attn_mask: use causal=True for the causal mask"
    ):
        layer(X, src_mask=LATER, is_causal=True)
    encoder = nn.TransformerEncoder(encoder_layer(), 1).double().eval()
    replace_attention(encoder, "window", window=3)
    encoder.use_nested_tensor = True
    with torch.no_grad(), pytest.raises(ea.UnsupportedError, match="needs use_nested_tensor=False"):
        encoder(X, src_key_padding_mask=PADDING)


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
