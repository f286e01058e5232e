"""The task `copy`: an encoder-decoder returns its source, by the recipe of Vaswani et al. 2017."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from efficient_attn.backends import resolve
from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.registry import Capabilities
from efficient_attn.runner.variants import YARDSTICK, Variant
from efficient_attn.studies.train.config import TrainConfig, optimiser, seeded
from efficient_attn.studies.train.tasks import IGNORED, Batch, stack_options
from efficient_attn.transformer.encoder_decoder import Transformer
from efficient_attn.transformer.generate import beam_search

# Token ids: padding, first token of a decoder's input, last token of a sequence, then the alphabet.
PADDING, BEGIN, END, _FIRST_SYMBOL = range(4)
_SYMBOLS = 16
# Width of the feed-forward network, relative to the model (Vaswani et al. 2017, table 3).
_WIDENING = 4
# Streams of random numbers: training and held-out sequences.
_LEARNED, _HELD_OUT = range(2)
# Half of it is the shortest sequence; shorter ones are so few that training would show the held-out ones.
_SHORTEST = 12
# Steps of the warm-up by default; rates that are taken, far beyond useful ones, with finite warm-ups.
_WARMUP = 156.25
_LEAST_RATE, _MOST_RATE = 1e-6, 1.0


class Copier(nn.Module):
    """An encoder-decoder of token ids.

    One embedding, times √model_dim, serves source, target and logits (Vaswani et al. 2017, section 3.4).
    """

    def __init__(self, transformer: Transformer, model_dim: int) -> None:
        super().__init__()
        self.transformer = transformer
        self.embedding = nn.Embedding(_FIRST_SYMBOL + _SYMBOLS, model_dim)
        nn.init.normal_(self.embedding.weight, std=model_dim**-0.5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits [sequences tokens vocabulary] of the token after each one of the target."""
        masks = {"source_mask": source != PADDING, "target_mask": target != PADDING}
        return self._logits(self.transformer(self._embed(source), self._embed(target), **masks))

    def decode(self, source: Tensor) -> Tensor:
        """Continuation of BEGIN found by beam search, in the source's shape and filled with END."""

        def step(ids: Tensor, state: Any) -> tuple[Tensor, Any]:
            first = {"source": self._embed(source), "source_mask": source != PADDING} if state is None else {}
            y, state = self.transformer.extend(self._embed(ids), state, **first)
            return self._logits(y), state

        return beam_search(step, torch.full_like(source[:, :1], BEGIN), source.shape[1], end=END)

    def _embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) * self.embedding.embedding_dim**0.5

    def _logits(self, y: Tensor) -> Tensor:
        return y @ self.embedding.weight.mT


class CopyTask:
    """Sequences of random symbols, which a decoder has to repeat.

    Adam with β₂ = 0.98 and ε = 1e-9 (section 5.3), label smoothing 0.1 (section 5.4), post-norm blocks and
    sinusoidal positions are the paper's. The rate is model_dim^−½ · min(step^−½, step · warmup^−3⁄2) (eq. 3),
    whose peak (model_dim · warmup)^−½ sets the warm-up.
    """

    unit = "token"
    label_smoothing = 0.1
    # An average over about 50 steps, in the place of the last five checkpoints (section 6.1).
    decay = 0.98
    calibrated_on = "a batch of the training sequences"

    def __init__(self, config: TrainConfig) -> None:
        if config.tokens < _SHORTEST:
            raise OptionError(
                f"seq_len={config.tokens}: the task copy takes {_SHORTEST} or more; shorter held-out "
                "sequences recur in training."
            )
        if not _LEAST_RATE <= config.learning_rate <= _MOST_RATE:
            raise OptionError(
                f"learning_rate={config.learning_rate}: the task copy takes {_LEAST_RATE:g} to "
                f"{_MOST_RATE:g}, by default {default_rate(config.model_dim):.3g}."
            )
        self._config = config
        self.digest = f"copy(symbols={_SYMBOLS})"
        self.case: Mapping[str, Any] = {"of": "encoder-decoder", "inputs": self.digest}
        self.warmup = 1 / (config.model_dim * config.learning_rate**2)
        self.held_out = self._drawn(_HELD_OUT, 0, config.windows)

    def batch(self, step: int) -> Batch:
        """Sequences of a step."""
        return self._drawn(_LEARNED, step, self._config.batch)

    def model(self, variant: Variant) -> Copier:
        """The encoder-decoder before its first step, with exact attention where `stays_exact` names it.

        Raises:
            UnsupportedError: If the backend takes no key mask, which padding needs.
        """
        config, promised = self._config, resolve(variant.target).capabilities
        if not promised.key_mask:
            raise UnsupportedError(
                f"Backend {variant.backend!r} takes no key mask, and sequences of the task copy are padded. "
                "Name a backend that takes one, or the task text."
            )
        seed, options = stack_options(variant, config)
        exact: dict[str, Any] = {}
        with seeded((config.seed,)):
            transformer = Transformer(
                config.model_dim,
                config.num_heads,
                variant.target,
                num_layers=config.num_layers,
                feed_forward_dim=_WIDENING * config.model_dim,
                max_tokens=config.tokens,
                seed=seed,
                decoder_backend=None if _decodes(promised) else YARDSTICK,
                cross_backend=variant.target if promised.cross else YARDSTICK,
                cross_options=options if promised.cross else exact,
                **options,
            )
            return Copier(transformer, config.model_dim)

    def optimiser(self, model: nn.Module) -> torch.optim.Optimizer:
        """Adam of section 5.3."""
        return optimiser(model, second_beta=0.98, epsilon=1e-9, weight_decay=0.0)

    def mistakes(self, model: nn.Module, batch: Batch) -> list[int]:
        """Wrong tokens of each sequence, its end included, as beam search decodes it."""
        assert isinstance(model, Copier)
        wrong = (model.decode(batch.inputs[0]) != batch.wanted) & (batch.wanted != IGNORED)
        return wrong.sum(dim=-1).tolist()

    def _drawn(self, stream: int, number: int, count: int) -> Batch:
        random, tokens = np.random.default_rng((self._config.seed, stream, number)), self._config.tokens
        places, lengths = np.arange(tokens), random.integers(tokens // 2, tokens, size=(count, 1))
        symbols = _FIRST_SYMBOL + random.integers(_SYMBOLS, size=(count, tokens))
        drawn = np.select([places < lengths, places == lengths], [symbols, END], PADDING)
        return teacher_forced(torch.from_numpy(drawn))


def teacher_forced(source: Tensor) -> Batch:
    """Sources [sequences tokens] that end in END and padding; the decoder reads the target one token late."""
    target = torch.cat((torch.full_like(source[:, :1], BEGIN), source[:, :-1]), dim=1)
    return Batch((source, target), source.masked_fill(source == PADDING, IGNORED))


def default_rate(model_dim: int) -> float:
    """Peak of the rate after a warm-up of about 156 steps at any model_dim."""
    return float((model_dim * _WARMUP) ** -0.5)


def doubtful_warmup(task: CopyTask, config: TrainConfig, *, steps: int) -> list[str]:
    """A note on a warm-up that never ends or is none, if the learning rate sets such a one."""
    if 1 <= task.warmup <= steps:
        return []
    usual = default_rate(config.model_dim)
    return [
        f"Warm-up: learning_rate={config.learning_rate:g} makes it 1 / (model_dim · learning_rate²) = "
        f"{task.warmup:.6g} of {steps} steps, so that hardly anything may be learned. The default is "
        f"{usual:.3g}, with {_WARMUP:.0f} steps."
    ]


def stays_exact(variants: Sequence[Variant]) -> list[str]:
    """A note on the parts of the models that keep exact attention, if there are any."""
    promised = {one.label: resolve(one.target).capabilities for one in variants}
    parts = {
        "the self-attention of the decoder": [name for name, one in promised.items() if not _decodes(one)],
        "cross-attention": [name for name, one in promised.items() if not one.cross],
    }
    found = [f"in {part}: {', '.join(names)}" for part, names in parts.items() if names]
    return [f"Exact attention stays, where a backend does not serve, {'; '.join(found)}."] if found else []


def _decodes(promised: Capabilities) -> bool:
    """Whether a backend serves the decoder's self-attention, in training and token by token."""
    return bool(promised.causal and promised.streaming)
