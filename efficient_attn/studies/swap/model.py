"""A Hugging Face model with the texts that it reads, and the backends that its attention is replaced by."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.errors import DataError, DtypeError, OptionError, UnsupportedError
from efficient_attn.integrations.transformers import swapping
from efficient_attn.integrations.transformers.assignment import assignment_of
from efficient_attn.integrations.transformers.attachment import installed
from efficient_attn.integrations.transformers.loading import Opened, open_model, positions, token_ids
from efficient_attn.measure import copies
from efficient_attn.measure import error as distances
from efficient_attn.measure.copies import copies_begin, copy_recall, with_copies
from efficient_attn.measure.texts import digest
from efficient_attn.measure.variants import OWN, Variant
from efficient_attn.registry import Choice
from efficient_attn.runs.workload import Workload
from efficient_attn.studies.swap.names import HELD_OUT, KL, MEAN_POOL, OWN_ATTENTION, WINDOW, choices

# Length of the shipped texts, at which approximations begin to differ.
_DEFAULT_TOKENS = 512
# With fewer there is no next token to predict, and nothing to average.
_FEWEST_TOKENS = 2

# Share of unknown tokens above which results say nothing of the model's use.
_MOST_UNKNOWN = 0.5

# Text for calibration; the other texts are held out.
FIRST_TEXT = "the first text"


@dataclass(frozen=True, eq=False)
class TextSubject:
    """A model and the texts that it runs on.

    Attributes:
        texts: Token ids, [1 tokens] each, of one length.
        calibration: Token ids for calibration; None: the first text.
        base: Backend and options of layers that have them beside every variant, by their numbers.
        original: The model with its own attention, as rows name it.
        loaded: The subject in the dtype of its checkpoint, whose outputs are the exact ones; None: this.
        casts: The model and its attention modules by dtype, for all subjects of a model.
    """

    model: Any
    sites: swapping.AttentionSites
    texts: tuple[Tensor, ...]
    shared: Mapping[str, Any]
    about: Mapping[str, Any]
    calibration: Tensor | None = None
    calibrated_on: str = FIRST_TEXT
    base: Mapping[int, Choice] = field(default_factory=dict)
    tokenizer: Any = None
    # The text from which prompts with planted numbers are made.
    filler: str = ""
    original: Variant = OWN_ATTENTION
    loaded: "TextSubject | None" = None
    casts: dict[torch.dtype, tuple[Any, swapping.AttentionSites]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, opened: Opened, texts: Mapping[str, str], workload: Workload, *, seq_len: int | None
    ) -> "TextSubject":
        """The model on the beginnings of the texts."""
        sites, ids = swapping.sites_of(opened.model), _token_ids(opened, texts, seq_len)
        if swapping.predicts_next(opened.model, sites):
            ids = tuple(with_copies(text, seed=workload.seed) for text in ids)
        first = sites.swapped[0]
        shared = {
            "num_heads": first.num_heads or 1,
            "num_kv_heads": first.num_kv_heads,
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
        return cls(
            opened.model,
            sites,
            ids,
            shared,
            {**opened.about, "texts": hashes},
            tokenizer=opened.tokenizer,
            filler=next(iter(texts.values())),
        )

    @cached_property
    def predicts(self) -> bool:
        return swapping.predicts_next(self.model, self.sites)

    @cached_property
    def exact(self) -> tuple[swapping.ModelOutputs, ...]:
        """Outputs of the model with its own attention, as loaded."""
        if self.loaded is not None:
            return self.loaded.exact
        return tuple(swapping.run(self.model, ids, predicts=self.predicts) for ids in self.texts)

    @property
    def loss(self) -> str:
        """Quantity by which plans are chosen."""
        if self.sites.causal and not self.predicts:
            raise UnsupportedError("advise needs an encoder, or a decoder with a language-model head.")
        return KL if self.predicts else MEAN_POOL

    @property
    def num_texts(self) -> int:
        return len(self.texts)

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that get a backend."""
        return self.sites.layers

    @property
    def sliding(self) -> tuple[int, ...]:
        return tuple(sorted({site.layer for site in self.sites.ordered if site.kind == "sliding"}))

    @property
    def notes(self) -> list[str]:
        """Remarks on attention that stays exact, and on texts that the tokenizer does not know."""
        others, count = self.sites.others, len(self.sites.ordered)
        kinds = " or ".join(sorted({site.kind for site in others}))
        notes = [f"{len(others)} of {count} attention layers stay exact ({kinds})."] if others else []
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        for name, ids in zip(self.about["texts"], self.texts, strict=True):
            share = 0.0 if unknown is None else float((ids == unknown).double().mean())
            if share > _MOST_UNKNOWN:
                words = f"{100 * share:.0f} % of its tokens are the tokenizer's unknown token"
                notes.append(f"{name}: {words}. Use a text in the model's language and format.")
        return notes

    def forward(self) -> Any:
        """The timed call: one forward pass on the first text."""
        return swapping.forward(self.model, self.texts[0])

    def distances(self, number: int) -> dict[str, float]:
        """Distances of the present outputs from the exact ones on one text."""
        ids, exact = self.texts[number], self.exact[number]
        replaced = swapping.run(self.model, ids, predicts=self.predicts)
        pooled = (states.hidden.double().mean(dim=0) for states in (replaced, exact))
        by_name = {
            "hidden_relative_error": distances.relative_error(replaced.hidden, exact.hidden),
            "mean_pool_distance": distances.cosine_distance(*pooled),
        }
        if replaced.logits is not None and exact.logits is not None:
            begin = copies_begin(ids.shape[1])
            by_name |= distances.next_token_distances(replaced.logits, exact.logits, ids[0, :begin])
            if begin < ids.shape[1]:
                by_name |= copy_recall(replaced.logits, exact.logits, ids[0])
        return by_name

    def right_answers(self) -> list[bool]:
        """Whether the model finds each of the numbers that prompts plant in the text."""
        prompts = copies.prompts(self.tokenizer, self.filler, self.shared["tokens"], seed=self.shared["seed"])
        answers: list[bool] = []
        for prompt in prompts:
            outputs = swapping.run(self.model, prompt.ids.to(self.model.device), predicts=True)
            if outputs.logits is not None:
                answers += copies.right_answers(outputs.logits, prompt)
        return answers

    @contextmanager
    def replaced(self, variant: Variant, draw: int = 0, layer: int | None = None) -> Iterator[bool]:
        """The model with the variant in its layers, and whether calibration was required."""
        if variant.backend == OWN:
            yield False
            return
        backends = self.build(variant, draw, layer)
        with installed(self.model, self.sites.ordered, backends):
            text = self.texts[0] if self.calibration is None else self.calibration
            yield swapping.calibrate_on(self.model, list(backends.values()), text)

    def build(self, variant: Variant, draw: int = 0, layer: int | None = None) -> dict[str, Any]:
        # All layers derive their own seeds from this seed.
        seed, tokens = self.shared["seed"] + draw, self.shared["tokens"]
        chosen = {**self.base, **choices(variant, self.layers, layer)}
        return swapping.build_layers(self.sites, chosen, max_tokens=tokens, seed=seed)

    def plan(self, variant: Variant) -> dict[str, Any] | None:
        """The plan that `attach` takes, or None if a backend has no registered name."""
        return assignment_of(self.model, self.build(variant))

    def in_dtype(self, dtype: torch.dtype, original: Variant) -> "TextSubject":
        """The model with its parameters in another dtype, as `from_pretrained(…, dtype=…)` loads it."""
        if dtype not in self.casts:
            # Buffers, such as rotary frequencies, keep their dtype.
            parameters = {id(x): nn.Parameter(x.detach().to(dtype)) for x in self.model.parameters()}
            model = deepcopy(self.model, parameters)
            self.casts[dtype] = model, swapping.sites_of(model)
        model, sites = self.casts[dtype]
        shared = {**self.shared, "dtype": str(dtype).removeprefix("torch.")}
        return replace(self, model=model, sites=sites, shared=shared, original=original, loaded=self)

    def fitted(self, variant: Variant) -> Variant:
        """The variant with the window of sliding layers, unless one was set: they can have no other."""
        first = self.sites.swapped[0]
        if first.kind != "sliding" or variant.label != WINDOW:
            return variant
        return replace(variant, options={**variant.options, "window": first.pattern.window})


def texts_of_lengths(
    opened: Opened, texts: Mapping[str, str], workload: Workload, lengths: Sequence[int]
) -> tuple[list[tuple[TextSubject, TextSubject]], list[str]]:
    """Texts that choose, texts that verify, and notes on lengths without them."""
    pairs: list[tuple[TextSubject, TextSubject]] = []
    notes, most = [], positions(opened)
    casts: dict[torch.dtype, tuple[Any, swapping.AttentionSites]] = {}
    for tokens in lengths:
        ids = {name: tuple(token_ids(opened, text, most=tokens)[0].tolist()) for name, text in texts.items()}
        # Of texts with the same beginning the first counts: held-out ones must differ.
        whole = {beginning: name for name, beginning in reversed(ids.items()) if len(beginning) == tokens}
        names = [*whole.values()][::-1]
        if most is not None and tokens > most:
            notes.append(f"{tokens} tokens were not measured: the model has {most} positions.")
        elif len(names) < 2:
            enough = f"{len(names)} of {len(texts)} texts are that long and distinct, not two"
            notes.append(f"{tokens} tokens were not measured: {enough}.")
        else:
            parts = ({name: texts[name] for name in group} for group in (names[::2], names[1::2]))
            choosing, held_out = (TextSubject.of(opened, part, workload, seq_len=tokens) for part in parts)
            windows = dict.fromkeys(choosing.sliding, Choice(WINDOW, {}))
            shared = {**held_out.shared, "inputs": f"{held_out.shared['inputs']}{HELD_OUT}"}
            common: dict[str, Any] = {"base": windows, "casts": casts}
            held_out = replace(held_out, shared=shared, calibration=choosing.texts[0], **common)
            pairs.append((replace(choosing, **common), held_out))
    if not pairs:
        raise DataError(f"No length can be measured. {' '.join(notes)}")
    return pairs, notes


def ranks_heads(opened: Opened) -> bool:
    """Whether the model has a language-model head, and full layers with several key/value heads."""
    sites = swapping.sites_of(opened.model)
    first = sites.swapped[0]
    several = first.kind == "full" and (first.num_kv_heads or first.num_heads or 1) > 1
    return several and swapping.predicts_next(opened.model, sites)


def load(model: Any, workload: Workload, dtype: str | None, tokens: int | None) -> Opened:
    """The model of a folder, or a loaded model in a pair with its tokenizer."""
    from transformers import PreTrainedModel

    if isinstance(model, (str, Path)):
        chosen = workload.dtype if dtype else None
        return open_model(model, dtype=chosen, device=workload.device, tokens=tokens or 0)
    if not isinstance(model, tuple) or not isinstance(model[0], PreTrainedModel):
        raise DtypeError(
            "model is a folder, a pair (model, tokenizer) of transformers, or makes its own inputs, not "
            f"{type(model).__name__}."
        )
    module, tokenizer = model
    if module.training:
        raise OptionError("model is in training mode, with dropout: call model.eval() first.")
    return Opened(module, tokenizer, dict.fromkeys(("model", "class"), type(module).__name__))


def _token_ids(opened: Opened, texts: Mapping[str, str], seq_len: int | None) -> tuple[Tensor, ...]:
    limit = positions(opened)
    if seq_len is not None and not _FEWEST_TOKENS <= seq_len <= (limit or seq_len):
        most_words = f"the {limit or 'unlimited'} positions of this model"
        raise OptionError(f"seq_len is from {_FEWEST_TOKENS} to {most_words}, not {seq_len}.")
    most = seq_len or min(_DEFAULT_TOKENS, limit or _DEFAULT_TOKENS)
    ids = {name: token_ids(opened, text, most=most) for name, text in texts.items()}
    shortest = min(ids, key=lambda name: ids[name].shape[1])
    length, needed = ids[shortest].shape[1], seq_len or _FEWEST_TOKENS
    if length < needed:
        raise DataError(f"The text {shortest!r} has {length} tokens, not {needed}; name a longer one.")
    return tuple(token_ids(opened, text, most=length) for text in texts.values())
