"""Words and numbers of errors: inputs and layers in words, errors to two digits."""

import re

# The shipped inputs that are longer than any text the model has read.
CONCATENATED = "stitched"
CONCATENATED_NOTE = (
    "Concatenated documents: q, k and v of four texts of 512 tokens each, read one by one and laid end to "
    "end. Attention across their borders is no attention of the model; 512 tokens are the longest real "
    "sequence that is shipped."
)


def describe(inputs: str) -> str:
    """`encoder(layer=0)` and `encoder(layers=0,1)` in words: `encoder, layer 0`, `encoder, layers 0, 1`."""
    source, _, inner = inputs.partition("(")
    source = "concatenated documents" if source == CONCATENATED else source
    return f"{source}, {_words(inner)}" if inner else source


def layer_words(inputs: str) -> str:
    """`layers 0, 1, 5` of `encoder(layers=0,1,5)`."""
    return _words(inputs.rpartition("(")[2])


def _words(inner: str) -> str:
    return re.sub(r",(?=\S)", ", ", inner.removesuffix(")").replace("=", " "))


def show_error(value: float) -> str:
    """Two significant digits; an exponent only for what is rounding or nonsense."""
    return f"{value:.0f}" if 10 <= value < 100_000 else f"{value:.2g}"
