"""Requests that layers, blocks, stacks and generation refuse, in one line."""

from functools import partial

import pytest
import torch
from transformer_modules import CONTEXT, DIM, HEADS, STACK, TOKENS, WIDE, build, mask, sequence

import efficient_attn as ea
from efficient_attn.errors import DtypeError, OptionError, ShapeError, UnknownNameError, UnsupportedError

X, SHORT, IDS = sequence(), sequence(CONTEXT, seed=1), torch.tensor([[2, 3]])


def layer(**arguments):
    return ea.AttentionLayer(**{"model_dim": 16, "num_heads": 4, **arguments})


def block(**arguments):
    return ea.TransformerBlock(DIM, HEADS, **{"feed_forward_dim": WIDE, "causal": True, **arguments})


def encoder(*backend, **arguments):
    return ea.Encoder(DIM, HEADS, *backend, **{**STACK, **arguments})


def generate(first=IDS, tokens=2, **arguments):
    return ea.generate(lambda ids, state: (torch.zeros(1, 1, 7), state), first, tokens, **arguments)


BUILT = [
    (layer, {"num_heads": 3}, OptionError, "model_dim=16 is not divided by num_heads=3: give head_dim"),
    (layer, {"num_kv_heads": 3}, OptionError, "num_heads=4 is not divided by num_kv_heads=3"),
    (layer, {"num_kv_heads": 0}, OptionError, "num_kv_heads is at least 1"),
    (layer, {"window": 3}, UnknownNameError, "option of 'exact' is called 'window'"),
    (layer, {"head_dim": 0}, OptionError, "head_dim is at least 1"),
    (layer, {"norm_eps": -1.0}, OptionError, "norm_eps is a finite number above 0"),
    (layer, {"head_dim": 3, "positions": "rotary"}, OptionError, "head_dim=3 is odd, and rotary"),
    (layer, {"positions": "learned"}, UnknownNameError, "positions in a block.*Known: rotary"),
    (block, {"backend": "linformer"}, UnsupportedError, "'linformer' cannot be causal.*exact.*window"),
    (block, {"cross_backend": "window"}, UnsupportedError, "'window' cannot read another sequence"),
    (block, {"norm": "middle"}, UnknownNameError, "choice of norm is called 'middle'.*post, pre"),
    (block, {"activation": "tanh"}, UnknownNameError, "choice of activation .*'tanh'.*gelu-tanh, relu"),
    (block, {"dropout": 1.0}, OptionError, "dropout is at least 0 and below 1"),
    (block, {"feed_forward_dim": 0}, OptionError, "feed_forward_dim is at least 1"),
    (block, {"norm_type": "batch"}, UnknownNameError, "norm_type"),
    (encoder, {"num_layers": 0}, OptionError, "num_layers is at least 1"),
    (encoder, {"seed": 0.5}, DtypeError, "seed is a whole number"),
    (encoder, {"rotary_base": 0.0}, OptionError, "rotary_base is a finite number above 0"),
    (encoder, {"rotary_scaling": float("inf")}, OptionError, "rotary_scaling is a finite number above 0"),
    (encoder, {"backend": 3 * ["exact"]}, OptionError, "num_layers=2 is no multiple"),
    (encoder, {"positions": "sinus"}, UnknownNameError, "choice of positions.*'sinus'.*'sinusoidal'"),
    (encoder, {"positions": "learned"}, OptionError, "give max_tokens"),
    (lambda: ea.Encoder(9, 3), {}, OptionError, "model_dim=9 is odd.*8 or 10"),
    (lambda: ea.Transformer(cross_backend=None), {}, OptionError, "give a cross_backend"),
    (lambda: ea.Transformer(backend="linformer"), {}, ea.AttentionError, "linformer"),
    (partial(ea.LanguageModel, 16, 2, num_layers=1), {"vocabulary": 0}, OptionError, "vocabulary .* least 1"),
    (generate, {"first": IDS.float()}, DtypeError, "first holds token numbers.*float32"),
    (generate, {"first": IDS.bool()}, DtypeError, "first holds token numbers.*bool"),
    (generate, {"first": IDS.cfloat()}, DtypeError, "first holds token numbers.*complex64"),
    (generate, {"first": IDS[:, :0]}, ShapeError, r"first has shape \[1, 0\].*at least 1 token"),
    (generate, {"tokens": -1}, OptionError, "tokens is at least 0"),
    (generate, {"temperature": -0.5}, OptionError, "temperature is at least 0, not -0.5"),
]


def extend_beyond_learned_positions():
    decoder = build(ea.Decoder, cross_backend=None, positions="learned")
    _, state = decoder.extend(X)
    decoder.extend(X[:, :1], state)


def misspelt(kind, name, argument, **sizes):
    """A row: an unknown argument of a module, refused with the names of its arguments."""
    message = f"No argument of {kind.__name__} or option of 'exact'.*'{name}'.* Known: .*\\b{argument}\\b"
    return partial(kind, DIM, HEADS, **sizes), {name: 2}, UnknownNameError, message


BUILT += [
    misspelt(ea.Encoder, "num_layer", "num_layers"),
    misspelt(ea.Decoder, "cross_backnd", "cross_backend"),
    misspelt(ea.Transformer, "decoder_backnd", "decoder_backend"),
    misspelt(ea.LanguageModel, "vocab", "vocabulary", num_layers=2),
    misspelt(ea.AttentionLayer, "qk_nrm", "qk_norm"),
]
LONG, WRONG = mask(TOKENS), mask(CONTEXT)
ATTENTION = ea.AttentionLayer
CALLED = [
    (lambda: build(ATTENTION)(X[0]), ShapeError, r"x has shape \[12, 32\]; wanted is \[batch, tokens"),
    (lambda: build(ATTENTION)(X, X[..., 1:]), ShapeError, r"context has shape \[2, 12, 31\]"),
    (lambda: build(ATTENTION)(IDS), DtypeError, "x is torch.int64; wanted are embeddings"),
    (lambda: build(ATTENTION)([1.0]), DtypeError, "x is a torch tensor .*, not list"),
    (lambda: build(ATTENTION)(X, key_mask=WRONG), ShapeError, r"key_mask has shape \[2, 7\] .* tokens of x"),
    (lambda: build(ATTENTION)(X, key_mask=LONG.long()), DtypeError, "key_mask is bool .*int64"),
    (lambda: build(ATTENTION)(X, SHORT, key_mask=LONG), ShapeError, r"key_mask .* of context.*\[2, 7\]"),
    (lambda: build(ATTENTION, "window")(X, X), UnsupportedError, "'window' cannot read another sequence"),
    (lambda: build(ATTENTION, causal=True)(X, X), UnsupportedError, "causal layer .* takes no context"),
    (lambda: build(ATTENTION, positions="rotary")(X, X), UnsupportedError, "Rotary positions compare"),
    (lambda: build(ATTENTION).extend(X), UnsupportedError, "extend needs a causal backend"),
    (lambda: build(ea.Decoder, cross_backend=None)(X, SHORT), UnsupportedError, "context was given to a bl"),
    (lambda: build(ea.Decoder)(X), OptionError, "has cross-attention and was given no.*cross_backend=None"),
    (lambda: build(ea.Decoder).extend(X), OptionError, "was given no context"),
    (lambda: build(ea.Decoder)(X, SHORT, context_mask=LONG), ShapeError, r"context_mask .* of context.*2, 7"),
    (lambda: build(ea.Transformer)(SHORT, X, source_mask=LONG), ShapeError, "source_mask .* of source.*2, 7"),
    (lambda: build(ea.Transformer)(SHORT, X, target_mask=WRONG), ShapeError, "target_mask .* of target.* 12"),
    (extend_beyond_learned_positions, ShapeError, "x reaches 13 tokens .* 12 learned .*max_tokens=13"),
    (lambda: build(ea.Transformer).extend(X), OptionError, "extend needs the source in its first call"),
]
ROWS = [*BUILT, *((call, {}, *rest) for call, *rest in CALLED)]


@pytest.mark.parametrize(("call", "arguments", "error", "message"), ROWS)
def test_requests_and_inputs_that_do_not_fit_are_refused_in_one_line(call, arguments, error, message):
    with pytest.raises(error, match=message) as refusal:
        call(**arguments)
    assert "\n" not in str(refusal.value)
