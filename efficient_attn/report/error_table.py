"""Words and numbers of errors: inputs and layers in words, errors to two digits."""

import re

# Inputs of earlier runs, longer than any text the model has read.
CONCATENATED = "stitched"
CONCATENATED_NOTE = (
    "Concatenated documents: q, k and v of four texts of 512 tokens each, read one by one and laid end to "
    "end. Attention across their borders is no attention of the model."
)

# Inputs whose names do not say what they are.
_WORDS = {CONCATENATED: "concatenated documents", "decoder": "causal decoder"}


def describe(inputs: str) -> str:
    """`encoder(layer=0)` and `encoder(layers=0,1)` in words: `encoder, layer 0`, `encoder, layers 0, 1`."""
    source, _, inner = inputs.partition("(")
    source = _WORDS.get(source, source)
    return f"{source}, {_words(inner)}" if inner else source


def layer_words(inputs: str) -> str:
    """`layers 0, 1, 5` of `encoder(layers=0,1,5)`."""
    return _words(inputs.rpartition("(")[2])


def _words(inner: str) -> str:
    return re.sub(r",(?=\S)", ", ", inner.removesuffix(")").replace("=", " "))


def show_error(value: float) -> str:
    """Two significant digits; an exponent only for what is rounding or nonsense."""
    return f"{value:.0f}" if 10 <= value < 100_000 else f"{value:.2g}"
