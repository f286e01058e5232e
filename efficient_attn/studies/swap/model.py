"""A model with the texts that it reads, and the backends that its attention is replaced by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from efficient_attn.contained import trial
from efficient_attn.errors import DataError, DtypeError, OptionError
from efficient_attn.integrations.transformers.loading import (
    Opened,
    check_length,
    open_model,
    positions,
    token_ids,
)
from efficient_attn.integrations.transformers.swapping import (
    MEAN,
    AttentionSites,
    Outputs,
    build_for,
    predicts_next,
    run,
    sites_of,
)
from efficient_attn.measure.texts import digest
from efficient_attn.runner.records import Case
from efficient_attn.runner.sizes import MEAN_OF_VALUES, MODEL
from efficient_attn.runner.variants import YARDSTICK, Variant, select
from efficient_attn.studies.workload import Workload

# Length of the shipped texts, at which approximations begin to differ.
_DEFAULT_TOKENS = 512
# With fewer there is no next token to predict, and nothing to average.
_FEWEST_TOKENS = 2


@dataclass(frozen=True, eq=False)
class Subject:
    """A model and the texts that it runs on.

    Attributes:
        texts: Token ids, [1 tokens] each, of one length.
        calibration: Token ids for calibration; None: the first text.
        shared: Fields common to all cases.
        about: Origin of model and texts.
    """

    model: Any
    sites: AttentionSites
    texts: tuple[Tensor, ...]
    shared: Mapping[str, Any]
    about: Mapping[str, Any]
    calibration: Tensor | None = None

    @classmethod
    def of(
        cls, opened: Opened, texts: Mapping[str, str], workload: Workload, *, seq_len: int | None
    ) -> "Subject":
        """The model on the beginnings of the texts."""
        sites, ids = sites_of(opened.model), _token_ids(opened, texts, seq_len)
        first = sites.swapped[0]
        shared = {
            "num_heads": first.num_heads or 1,
            "head_dim": first.head_dim,
            "tokens": ids[0].shape[1],
            "causal": sites.causal,
            "dtype": str(opened.model.dtype).removeprefix("torch."),
            "device": str(opened.model.device),
            "threads": workload.threads,
            "inputs": f"{opened.about['model']} on {digest(texts)}",
            "seed": workload.seed,
        }
        hashes = {name: sha256(text.encode()).hexdigest() for name, text in texts.items()}
        return cls(opened.model, sites, ids, shared, {**opened.about, "texts": hashes})

    @cached_property
    def predicts(self) -> bool:
        """Whether next-token distributions are compared, rather than embeddings."""
        return predicts_next(self.model, self.sites)

    @cached_property
    def exact(self) -> tuple[Outputs, ...]:
        """Outputs of the model with its own attention."""
        return tuple(run(self.model, ids, predicts=self.predicts) for ids in self.texts)

    @property
    def notes(self) -> list[str]:
        """A remark on attention that stays exact."""
        if not self.sites.others:
            return []
        kinds = " or ".join(sorted({site.kind for site in self.sites.others}))
        return [
            f"{len(self.sites.others)} of {len(self.sites.every)} attentions are {kinds} and stay exact; "
            "the others are swapped."
        ]

    def case(self, kind: str, variant: Variant, layer: int | None = None) -> Case:
        return variant.case(kind=kind, of=MODEL, layer=layer, **self.shared)


def load(model: Any, tokenizer: Any, name: str | None, workload: Workload) -> Opened:
    """The model of a folder, or a loaded model with its tokenizer."""
    from transformers import PreTrainedModel

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


def candidates(chosen: Sequence[Variant], subject: Subject) -> tuple[Variant, ...]:
    """Exact attention, the uniform-attention baseline, then the other variants, each built once.

    Raises:
        OptionError: If a set value never works.
    """
    exact = [variant for variant in chosen if variant.backend == YARDSTICK] or select([YARDSTICK])
    others = [variant for variant in chosen if variant.backend != YARDSTICK]
    if any(site.kind == "sliding" for site in subject.sites.swapped):
        # A sliding layer can have no window but its own, unless one was set.
        window = {"window": subject.sites.swapped[0].pattern.window}
        others = [
            replace(one, options={**one.options, **window})
            if one.label == one.backend and "window" in one.options
            else one
            for one in others
        ]
    tokens, seed = subject.shared["tokens"], subject.shared["seed"]
    for one in others:
        if one.label != one.backend:
            with trial():
                build_for(subject.sites, one.target, one.options, layer=None, max_tokens=tokens, seed=seed)
    mean = Variant(backend=MEAN_OF_VALUES, label=MEAN_OF_VALUES, target=MEAN)
    return (*exact, mean, *others)


def _token_ids(opened: Opened, texts: Mapping[str, str], seq_len: int | None) -> tuple[Tensor, ...]:
    """The beginnings of the texts, all of one length."""
    if seq_len is not None:
        if seq_len < _FEWEST_TOKENS:
            raise OptionError(f"seq_len is at least {_FEWEST_TOKENS}, not {seq_len!r}.")
        check_length(opened, seq_len, name="seq_len")
    most = seq_len or min(_DEFAULT_TOKENS, positions(opened) or _DEFAULT_TOKENS)
    ids = {name: token_ids(opened, text, most=most) for name, text in texts.items()}
    shortest = min(ids, key=lambda name: ids[name].shape[1])
    length = ids[shortest].shape[1]
    if length < (seq_len or _FEWEST_TOKENS):
        wanted = f"seq_len={seq_len}" if seq_len else f"the {_FEWEST_TOKENS} that are needed"
        raise DataError(f"The text {shortest!r} has {length} tokens, fewer than {wanted}; name a longer one.")
    return tuple(token_ids(opened, text, most=length) for text in texts.values())
