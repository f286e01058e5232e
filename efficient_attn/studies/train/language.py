"""The task `text`: a causal language model of bytes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from efficient_attn.runner.variants import Variant
from efficient_attn.studies.train.config import TrainConfig, optimiser, seeded
from efficient_attn.studies.train.tasks import Batch, stack_options
from efficient_attn.studies.train.text import Text, batch_at, windows
from efficient_attn.transformer.language_model import LanguageModel

# Steps up to the peak learning rate, the default of the peak, and positions of the models.
WARMUP, RATE, POSITIONS = 20, 0.01, "rotary"


class LanguageTask:
    """The next byte of windows of a text, at every place."""

    unit = "byte"
    warmup: float = WARMUP
    label_smoothing = 0.0
    decay = 0.0
    calibrated_on = "a batch of the training text"

    def __init__(self, text: Text, config: TrainConfig) -> None:
        self._text, self._config = text, config
        self.case: Mapping[str, Any] = {"of": "encoder", "causal": True, "inputs": text.name}
        self.digest = text.sha256
        self.held_out = _next_bytes(windows(text.held_out, config.windows, tokens=config.tokens))

    def batch(self, step: int) -> Batch:
        """Windows of a step."""
        config = self._config
        drawn = batch_at(step, self._text, seed=config.seed, batch=config.batch, tokens=config.tokens)
        return _next_bytes(drawn)

    def model(self, variant: Variant) -> LanguageModel:
        """The language model before its first step."""
        config = self._config
        seed, options = stack_options(variant, config)
        with seeded((config.seed,)):
            return LanguageModel(
                config.model_dim,
                config.num_heads,
                variant.target,
                num_layers=config.num_layers,
                positions=POSITIONS,
                max_tokens=config.tokens,
                seed=seed,
                **options,
            )

    def optimiser(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW with weight decay."""
        return optimiser(model)

    def mistakes(self, model: nn.Module, batch: Batch) -> list[int]:
        """None: a text has no right continuation."""
        return []


def _next_bytes(drawn: np.ndarray) -> Batch:
    """Windows [windows tokens+1] as inputs, and each byte's successor."""
    ids = torch.from_numpy(drawn.astype(np.int64))
    return Batch((ids[:, :-1],), ids[:, 1:])
