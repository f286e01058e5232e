"""A task: its batches, its model, its loss and the evaluation of its model."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_attn.modules.options import SEED
from efficient_attn.runner.variants import Variant
from efficient_attn.studies.train.config import TrainConfig

# Entry of `wanted` that no loss counts; the default of cross_entropy.
IGNORED = -100


class Batch(NamedTuple):
    """Inputs of a model, each int64 [sequences tokens], and the token wanted at each place, or IGNORED."""

    inputs: tuple[Tensor, ...]
    wanted: Tensor

    def to(self, device: str) -> "Batch":
        """The batch on a device."""
        return Batch(tuple(one.to(device) for one in self.inputs), self.wanted.to(device))

    def split(self, sequences: int) -> "Iterator[Batch]":
        """Parts of at most so many sequences."""
        parts = [one.split(sequences) for one in (*self.inputs, self.wanted)]
        for *inputs, wanted in zip(*parts, strict=True):
            yield Batch(tuple(inputs), wanted)


class Task(Protocol):
    """A task of `train`.

    Attributes:
        case: Fields of the cases of its records.
        digest: Identity of the data, kept in checkpoints.
        unit: Name of a token in quantities, `byte` or `token`.
        held_out: Sequences of an evaluation, of which no batch is made.
        warmup: Steps up to the peak learning rate.
        label_smoothing: Share ε of the wanted distribution that is uniform (Szegedy et al. 2016).
        decay: Factor of late steps in the moving average of the weights that are evaluated; 0: no average.
        calibrated_on: Inputs of a calibration.
    """

    case: Mapping[str, Any]
    digest: str
    unit: str
    held_out: Batch
    warmup: float
    label_smoothing: float
    decay: float
    calibrated_on: str

    def batch(self, step: int) -> Batch:
        """The batch of a step: it depends on the seed and the step alone."""

    def model(self, variant: Variant) -> nn.Module:
        """A model before its first step, which maps the inputs of a batch to logits [… tokens vocabulary].

        Parameters that models of all backends have are equal in all.
        """

    def optimiser(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimiser, with its state."""

    def mistakes(self, model: nn.Module, batch: Batch) -> list[int]:
        """Number of wrong tokens of each decoded sequence; empty if nothing is decoded."""


def loss(task: Task, model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the wanted tokens in nats, with the task's label smoothing."""
    logits = model(*batch.inputs).flatten(0, 1)
    return F.cross_entropy(logits, batch.wanted.flatten(), label_smoothing=task.label_smoothing)


def bits(model: nn.Module, batch: Batch) -> Tensor:
    """Bits per wanted token of each sequence, in float64 and without label smoothing, [sequences]."""
    nats = F.cross_entropy(model(*batch.inputs).mT, batch.wanted, reduction="none").double()
    return (nats.sum(dim=-1) / (batch.wanted != IGNORED).sum(dim=-1)).cpu() / math.log(2)


def stack_options(variant: Variant, config: TrainConfig) -> tuple[int, dict[str, Any]]:
    """Seed of a stack, which gives each layer its own, and the other options of the backend."""
    options = {name: value for name, value in variant.options.items() if name != SEED}
    return variant.options.get(SEED, config.seed), options
