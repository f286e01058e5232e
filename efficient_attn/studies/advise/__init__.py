"""Length from which a model is faster with efficient attention, at what loss."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from efficient_attn.errors import OptionError
from efficient_attn.measure.texts import Texts, long_texts, named_texts
from efficient_attn.measure.units import parse_sizes
from efficient_attn.measure.variants import DENSE, UNIFORM_ATTENTION, Variant, select
from efficient_attn.options import option
from efficient_attn.problem import positive_count
from efficient_attn.runs import shared_options as shared
from efficient_attn.runs.study import Points, Study
from efficient_attn.runs.workload import core_words
from efficient_attn.studies.advise.names import BOUND, HEADS, RETRIEVAL
from efficient_attn.studies.advise.record import AdviseRecord, AdviseSettled, Targets
from efficient_attn.studies.swap import DECIDES, OF_A_FOLDER, model_workload, promising, text_option
from efficient_attn.studies.swap.names import KL

_SEQ_LENS = (512, 2048, 8192)
# Lengths of a decoder whose key/value heads are ranked.
_DECODER_SEQ_LENS = (4096,)

# Targets with their defaults, nats for divergence and loss; recall is a share of exact attention's.
_OF_COSINE, _OF_KL = {"min_cosine": 0.99}, {"max_kl": 0.05}
_OF_HEADS = {"max_kl": 0.01, "max_loss": 0.01, "min_recall": 0.98}
_TARGETS = {**_OF_COSINE, **_OF_HEADS}

# No target is larger; float64 has no divergence above 745 nats.
_LARGEST = 1e3


class _Setup(NamedTuple):
    """Function that starts the measurement, with what it decided and remarks."""

    points: Callable[[], Points]
    settled: AdviseSettled
    notes: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class Advise(Study):
    """Find the sequence length above which a model runs faster.

    Plans efficient attention in the layers where the error target allows it, verifies speed and error on
    held-out texts, and writes the plan to layers.json for `attach`. Without a model, use bench.

    Example: efficient-attn advise MODEL --text a.txt --text b.txt --budget 5m
    """

    kinds = (HEADS, RETRIEVAL, BOUND)
    record = AdviseRecord
    views = "efficient_attn.studies.advise.view"
    settled_type = AdviseSettled
    budget_s = 300.0

    model: Any = option(None, shared.MODEL_HELP, metavar="MODEL", argument=True)
    backends: shared.Backends = shared.backends(free=False)
    _: KW_ONLY
    texts: Texts | None = text_option()
    seq_lens: shared.Sizes | None = shared.seq_lens(
        None, "Sequence lengths in tokens: 512,1k or 256:4096:x2; 512,2048,8192 if omitted."
    )
    min_cosine: float | None = option(
        None, "Min. cosine similarity with the exact output; 0.99 if omitted.", least=0, most=1
    )
    max_kl: float | None = option(
        None, "Max. KL divergence of the next token, in nats; 0.05 (per-head plan: 0.01) if omitted.", least=0
    )
    max_loss: float | None = option(
        None, "Max. loss increase of a per-head plan, in nats; 0.01 if omitted.", least=0
    )
    min_recall: float | None = option(
        None, "Min. share of exact attention's copy recall; 0.98 if omitted.", least=0, most=1
    )
    options: shared.Settings = shared.settings(free=False)
    dtype: str | None = option(None, "Dtype of MODEL; that of its checkpoint if omitted.")
    device: str | None = shared.device(None, "auto")
    threads: int | None = shared.threads()
    rounds: int | None = option(
        None, "Timing rounds; until the plan's speed is decided if omitted.", least=1, rare=True, free=True
    )
    seed: int = shared.seed()

    def check(self) -> None:
        if self.rounds is not None:
            positive_count("rounds", self.rounds)
        if self.seq_lens is not None:
            parse_sizes(self.seq_lens, name="seq_lens")
        if self.model is None:
            raise OptionError("MODEL is missing. Attention without a model: efficient-attn bench.")

    def settle(self) -> AdviseSettled:
        return self._setup.settled

    def notes(self) -> Sequence[str]:
        return self._setup.notes

    def points(self) -> Points:
        """The cheapest and most promising points first, others left out by prediction."""
        return self._setup.points()

    @cached_property
    def _setup(self) -> _Setup:
        from efficient_attn.studies.advise.model import model_steps
        from efficient_attn.studies.swap.called import called_pair, is_called
        from efficient_attn.studies.swap.measure import candidates, has_copies

        workload = model_workload(self, "auto")
        pairs: Sequence[tuple[Any, Any]]
        left_out: list[str] = []
        variants, decodes = self._variants(), False
        if is_called(self.model):
            self.refuse(*OF_A_FOLDER, reason=DECIDES)
            pairs = [called_pair(self.model, workload)]
            origin = pairs[0][0].about
        else:
            from efficient_attn.integrations.transformers.loading import positions
            from efficient_attn.measure.copies import FEWEST_TOKENS
            from efficient_attn.studies.swap.model import load, ranks_heads, texts_of_lengths

            least = None if self.seq_lens is None else min(self._lengths(()))
            opened = load(self.model, workload, self.dtype, least)
            decodes = self.backends is None and ranks_heads(opened)
            fits = (positions(opened) or math.inf) >= max(_DECODER_SEQ_LENS)
            lengths = self._lengths(_DECODER_SEQ_LENS if decodes and fits else _SEQ_LENS)
            long = decodes and self.texts is None and min(lengths) >= FEWEST_TOKENS
            named = long_texts() if long else named_texts(self.texts)
            pairs, left_out = texts_of_lengths(opened, named, workload, lengths)
            hashes = {key: sha256(text.encode()).hexdigest() for key, text in named.items()}
            origin = {**opened.about, "texts": hashes}
        first = pairs[0][0]
        notes = [note for subject in pairs[0] for note in subject.notes]
        ranked = decodes and any(has_copies(choosing) for choosing, _ in pairs)
        values = self._targets(_OF_COSINE if first.loss != KL else _OF_HEADS if ranked else _OF_KL)
        limit = values.pop("max_kl") if first.loss == KL else 1 - values.pop("min_cosine")
        target = msgspec.convert({"quantity": first.loss, "limit": limit, **values}, Targets)
        variants = candidates(variants, first)
        points = partial(model_steps, pairs, variants, target, rounds=self.rounds, ranks_heads=ranked)
        settled = AdviseSettled(
            candidates=tuple(x.label for x in variants if x.backend != UNIFORM_ATTENTION),
            **{name: first.shared[name] for name in ("device", "dtype", "threads")},
            free_cores=core_words(workload, self.threads),
            model=origin,
            target=target,
        )
        return _Setup(points, settled, notes=[*dict.fromkeys(notes), *left_out])

    def _lengths(self, default: Sequence[int]) -> tuple[int, ...]:
        return parse_sizes(default if self.seq_lens is None else self.seq_lens, name="seq_lens")

    def _targets(self, defaults: Mapping[str, float]) -> dict[str, float]:
        others = [name for name in _TARGETS if name not in defaults]
        self.refuse(*others, reason=f"here; use {', '.join(defaults)}")
        values = {name: value for name in defaults if (value := getattr(self, name)) is not None}
        for name, value in values.items():
            most = 1.0 if name.startswith("min_") else _LARGEST
            if not isinstance(value, (int, float)) or not 0 <= value <= most:
                raise OptionError(f"{name} is a number from 0 to {most:g}, not {value!r}.")
        return {**defaults, **values}

    def _variants(self) -> tuple[Variant, ...]:
        """Variants, by default the most promising first, in a model without score matrices."""
        chosen = select(self.backends, self.options)
        if self.backends is None:
            chosen = tuple(sorted((x for x in chosen if x.backend != DENSE), key=promising))
        return chosen
