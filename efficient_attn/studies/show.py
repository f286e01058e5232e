"""What backends look at: the weights that they imply on a text, beside those of exact attention."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from efficient_attn.contained import contained, described
from efficient_attn.errors import OptionError, ShapeError
from efficient_attn.report.axes import draw
from efficient_attn.report.error_table import describe, show_error
from efficient_attn.report.table import Table
from efficient_attn.report.weights_plot import WeightsMap, weights_plot
from efficient_attn.runner.variants import Variant, select
from efficient_attn.stats.curves import YARDSTICK

DEFAULT_TOKENS = "0:24"
# It looks nearby, at the beginning, and sometimes far away: all that backends differ in.
DEFAULT_HEAD = 6
# Exact attention in another way, and another estimate of the same kind, would be the same picture twice.
DEFAULT_BACKENDS = (
    "exact",
    "window-clusters",
    "window",
    "linformer",
    "performer-full",
    "performer-positive",
)


class Shown:
    """Heat maps that were computed.

    Attributes:
        maps: Exact attention first.
        words: Those on the axes.
        title: What is shown.
        keys: How many keys a query reads.
        notes: What could not be shown, and why.
    """

    def __init__(
        self, maps: Sequence[WeightsMap], words: Sequence[str], *, title: str, keys: int, notes: Sequence[str]
    ) -> None:
        self.maps, self.words, self.notes = tuple(maps), tuple(words), tuple(notes)
        self.title, self.keys = title, keys

    def plot(self) -> Any:
        """The figure."""
        more = f"{self.keys - len(self.words)} others"
        return draw(weights_plot(self.maps, self.words, title=self.title, keys=self.keys, more=more))[
            0
        ].figure

    def table(self) -> Table:
        """The numbers of the titles."""
        rows = tuple(
            (
                one.label,
                show_error(one.error),
                "–" if one.entropy is None else f"{one.entropy:.2f}",
                f"{one.lowest:.2g}",
                f"{float(one.elsewhere.mean()):.0%}",
            )
            for one in self.maps
        )
        columns = (
            "backend",
            "error of the output",
            "entropy of a row, nats",
            "lowest weight",
            "to other keys",
        )
        return Table(self.title, columns, rows, self.notes)


def show(
    backends: Sequence[Any] | None = None,
    *,
    inputs: str | Path = "encoder",
    layer: int | None = None,
    head: int = DEFAULT_HEAD,
    tokens: str = DEFAULT_TOKENS,
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    seed: int = 0,
) -> Shown:
    """The attention weights of one head, for exact attention and for backends; `.plot()` draws them.

    Every backend reads all tokens of the inputs; some of them stand on the axes.

    Args:
        backends: Names, `file.py:object`, modules or functions f(q, k, v); None stands for one of each kind.
        inputs: `encoder` (the shipped sample), `stitched` or a safetensors file.
        layer: None: 1 of what is shipped, the first of a file.
        tokens: Those on the axes, `0:24` for the first 24.
        options: {backend: {option: values}}; every combination is a variant.
        seed: Of what is random in backends.
    """
    chosen = _chosen(backends, options)
    from efficient_attn.runner.accuracy import try_options
    from efficient_attn.runner.one_subject import one_subject, words_of

    if inputs == "gaussian":
        raise OptionError("inputs are encoder, stitched or a safetensors file; Gaussian draws have no words.")
    subject = one_subject(inputs, layer=layer, seed=seed)
    heads = subject.activations.q.shape[1]
    if not 0 <= head < heads:
        raise OptionError(f"head is from 0 to {heads - 1}, not {head}.")
    span = _span(tokens, subject.tokens)
    for variant in chosen:
        try_options(variant, subject)
    maps, notes = [], []
    for variant in chosen:
        try:
            with contained():
                maps.append(_map(variant, subject, head, span))
        except Exception as failure:  # The backend may be anybody's code: whatever it raises is its result.
            notes.append(f"{variant.label}: {described(failure)}")
    words = words_of(inputs, subject.tokens)[span]
    title = f"Attention weights: {describe(subject.name)}, head {head}; {subject.tokens} keys"
    return Shown(maps, words, title=title, keys=subject.tokens, notes=notes)


def _chosen(
    backends: Sequence[Any] | None, options: Mapping[str, Mapping[str, Sequence[Any]]] | None
) -> tuple[Variant, ...]:
    """The variants, exact attention first."""
    from efficient_attn.backends import list_backends

    named = [name for name in DEFAULT_BACKENDS if name in list_backends()] if backends is None else backends
    chosen = select(named, options)
    exact = [variant for variant in chosen if variant.backend == YARDSTICK] or select([YARDSTICK])
    return (*exact, *(variant for variant in chosen if variant.backend != YARDSTICK))


def _span(text: str, tokens: int) -> slice:
    first, colon, last = text.partition(":")
    if not (colon and first.strip().isdecimal() and last.strip().isdecimal()):
        raise OptionError(f"tokens are a range such as {DEFAULT_TOKENS}, not {text!r}.")
    if not int(first) < int(last) <= tokens:
        raise OptionError(f"tokens are a range within 0:{tokens}, not {text!r}.")
    return slice(int(first), int(last))


def _map(variant: Variant, subject: Any, head: int, span: slice) -> WeightsMap:
    import torch

    from efficient_attn.measure.checked import outputs_checked
    from efficient_attn.measure.error import entropy, output_error
    from efficient_attn.runner.accuracy import one_backend

    q, k, v = subject.activations
    with torch.no_grad():
        backend = one_backend(variant, subject)
        with outputs_checked(backend):
            error = output_error(backend(q, k, v), subject.exact).relative_by_head[0, head]
        weights = backend.attention_weights(q, k)[0, head]
    if weights.shape != (subject.tokens, subject.tokens):
        raise ShapeError(f"output {list(weights.shape)} is not as wide as the values, {subject.tokens}.")
    rows = weights[span]
    return WeightsMap(
        label=variant.label,
        weights=rows[:, span].numpy(),
        elsewhere=(rows.sum(dim=-1) - rows[:, span].sum(dim=-1)).numpy(),
        error=float(error),
        entropy=entropy(weights),
        lowest=float(weights.min()),
    )
