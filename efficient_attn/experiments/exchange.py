"""What a swap is about: the model, the texts that it reads, the backends, and how all is measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from efficient_attn.analysis.curves import YARDSTICK
from efficient_attn.contained import contained
from efficient_attn.errors import AttentionError, DataError, DtypeError, OptionError, UnsupportedError
from efficient_attn.experiments.workload import Workload, settle
from efficient_attn.measure.texts import shipped_texts
from efficient_attn.problem import positive_count
from efficient_attn.sweep.sizes import MEAN_OF_VALUES
from efficient_attn.sweep.variants import Variant, select

DEFAULT_SEEDS = 3

# Of the shipped texts, and the length at which approximations begin to differ.
_DEFAULT_TOKENS = 512
# With fewer there is no next token to predict, and nothing to average.
_FEWEST_TOKENS = 2

Texts = Mapping[str, str] | Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What is swapped for what, and on which texts.

    Attributes:
        variants: Exact attention first, then the mean of the values, then the others.
        subject: The model with its texts.
        seeds: Draws of random features.
        by_layer: Also swap each layer alone.
        about: The origin of model and texts.
        notes: What should be known beside the numbers.
    """

    variants: tuple[Variant, ...]
    subject: Any
    seeds: int
    by_layer: bool
    about: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def layers(self) -> tuple[int | None, ...]:
        """None for all layers together, then each alone."""
        return (None, *(self.subject.sites.layers if self.by_layer else ()))


def exchange(
    model: Any,
    backends: Sequence[Any] | None,
    *,
    texts: Texts | None,
    tokenizer: Any,
    tokens: int | None,
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None,
    seeds: int,
    by_layer: bool,
    name: str | None,
    workload: Workload,
) -> Exchange:
    """Everything that is to be measured; the model is loaded, nothing else runs.

    Raises:
        OptionError, DataError, UnsupportedError: If the request makes no sense for this model.
    """
    positive_count("seeds", seeds)
    if tokens is not None and tokens < _FEWEST_TOKENS:
        raise OptionError(f"tokens is at least {_FEWEST_TOKENS}, not {tokens!r}.")
    named = _named(texts)
    settled = settle(workload)
    chosen = select(_near_softmax() if backends is None else backends, options)

    from efficient_attn.integrations.transformers.swapping import MEAN, sites_of
    from efficient_attn.sweep.models import ModelSubject

    opened = _open(model, tokenizer, name, settled)
    sites = sites_of(opened.model)
    ids = _read(opened, named, tokens)
    first = sites.swapped[0]
    shared = {
        "num_heads": first.num_heads or 1,
        "head_dim": first.head_dim,
        "tokens": ids[0].shape[1],
        "causal": sites.causal,
        "dtype": str(opened.model.dtype).removeprefix("torch."),
        "device": str(opened.model.device),
        "threads": settled.threads,
        "inputs": f"{opened.about['model']} on {_called(named)}",
        "seed": settled.seed,
    }
    exact = [variant for variant in chosen if variant.backend == YARDSTICK] or select([YARDSTICK])
    others = [variant for variant in chosen if variant.backend != YARDSTICK]
    mean = Variant(backend=MEAN_OF_VALUES, label=MEAN_OF_VALUES, target=MEAN)
    if any(site.kind == "sliding" for site in sites.swapped):
        others = [_as_wide(variant, first.pattern.window) for variant in others]
    subject = ModelSubject(opened=opened, sites=sites, texts=ids, shared=shared)
    _try_options(others, subject)
    return Exchange(
        variants=(*exact, mean, *others),
        subject=subject,
        seeds=seeds,
        by_layer=by_layer,
        about={
            **opened.about,
            "texts": {text: sha256(words.encode()).hexdigest() for text, words in named.items()},
        },
        notes=tuple(_notes(sites)),
    )


def _named(texts: Texts | None) -> dict[str, str]:
    if texts is None:
        return shipped_texts()
    if isinstance(texts, str):
        raise DtypeError("texts is a list of texts, or a mapping from names to texts, not one text.")
    named = dict(texts) if isinstance(texts, Mapping) else {f"text {i}": text for i, text in enumerate(texts)}
    if not named or not all(isinstance(text, str) for text in named.values()):
        raise DtypeError("texts is a list of texts, or a mapping from names to texts; at least one.")
    return named


def _called(named: Mapping[str, str]) -> str:
    """How many texts, and what tells them from others: records of other texts are another measurement."""
    digest = sha256("\0".join(named.values()).encode()).hexdigest()[:8]
    return f"{len(named)} {'text' if len(named) == 1 else 'texts'} #{digest}"


def _open(model: Any, tokenizer: Any, name: str | None, workload: Workload) -> Any:
    from transformers import PreTrainedModel

    from efficient_attn.integrations.transformers.loading import Opened, open_model

    if isinstance(model, (str, Path)):
        if tokenizer is not None:
            raise OptionError("tokenizer is for a model that is loaded; a folder has its own.")
        return open_model(model, dtype=workload.dtype, device=workload.device, name=name)
    if not isinstance(model, PreTrainedModel):
        raise DtypeError(f"model is a folder or a model of transformers, not {type(model).__name__}.")
    if tokenizer is None:
        raise OptionError("tokenizer is needed with a model that is loaded: the one that belongs to it.")
    if model.training:
        raise OptionError(
            "model is in training mode, where dropout would be taken for an error; model.eval() first."
        )
    return Opened(model, tokenizer, {"model": name or type(model).__name__, "class": type(model).__name__})


def _read(opened: Any, named: Mapping[str, str], tokens: int | None) -> tuple[Any, ...]:
    """The beginnings of the texts, all of one length."""
    from efficient_attn.integrations.transformers.loading import check_length, positions, token_ids

    if tokens is not None:
        check_length(opened, tokens, name="tokens")
    most = tokens or min(_DEFAULT_TOKENS, positions(opened) or _DEFAULT_TOKENS)
    ids = {text: token_ids(opened, words, most=most) for text, words in named.items()}
    shortest = min(ids, key=lambda text: ids[text].shape[1])
    length = ids[shortest].shape[1]
    if length < (tokens or _FEWEST_TOKENS):
        wanted = f"tokens={tokens}" if tokens else f"the {_FEWEST_TOKENS} that are needed"
        raise DataError(f"The text {shortest!r} has {length} tokens, fewer than {wanted}; name a longer one.")
    return tuple(token_ids(opened, words, most=length) for words in named.values())


def _try_options(variants: Sequence[Variant], subject: Any) -> None:
    """Build what has options set, once: a value that never works is a wrong request."""
    from efficient_attn.integrations.transformers.swapping import build_for

    for variant in variants:
        if variant.label == variant.backend:
            continue
        try:
            with contained():
                build_for(
                    subject.sites,
                    variant.target,
                    variant.options,
                    layer=None,
                    max_tokens=subject.shared["tokens"],
                    seed=subject.seed,
                )
        except UnsupportedError:
            # No promise was made: that is a result, and is recorded as one.
            continue
        except AttentionError:
            raise
        except Exception:
            # Whatever somebody else's builder raises is raised again where it is recorded.
            continue


def _as_wide(variant: Variant, window: int | None) -> Variant:
    """The variant with the window of the model, where nobody set one: a sliding layer can have no other."""
    if variant.label != variant.backend or "window" not in variant.options:
        return variant
    return replace(variant, options={**variant.options, "window": window})


def _notes(sites: Any) -> list[str]:
    if not sites.others:
        return []
    kinds = sorted({site.kind for site in sites.others})
    count = len(sites.others)
    return [
        f"{count} of {len(sites.every)} attentions are {' or '.join(kinds)} and stay exact; the others are "
        "swapped."
    ]


def _near_softmax() -> list[str]:
    """Exact attention and what is meant to come near it."""
    from efficient_attn.backends import list_backends, spec

    return [name for name in list_backends() if spec(name).capabilities.approximates_softmax]
