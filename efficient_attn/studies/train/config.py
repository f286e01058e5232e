"""Configuration that all models of a training run share, and the update of a model."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from efficient_attn.modules.options import positive_number, whole_number
from efficient_attn.problem import positive_count

# The longest gradient: a batch that a model gets very wrong moves it no farther than others do.
_LONGEST_GRADIENT = 1.0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Task, model, optimiser and evaluation of a run; a learning curve follows from these and the text.

    Attributes:
        tokens: Bytes of a window, or tokens of the longest sequence.
        batch: Windows or sequences of a step.
        learning_rate: Peak, after the warm-up; it then falls with the root of the step.
        every: Steps from one evaluation, and one checkpoint, to the next.
        windows: Held-out windows or sequences of an evaluation.
        seed: Random seed of weights, batches and features.
    """

    tokens: int
    batch: int
    model_dim: int
    num_heads: int
    num_layers: int
    learning_rate: float
    every: int
    windows: int
    seed: int
    device: str
    threads: int
    task: str = "text"

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "model_dim", "num_heads", "num_layers", "every", "windows"):
            positive_count("seq_len" if name == "tokens" else name, getattr(self, name))
        whole_number("seed", self.seed)
        positive_number("learning_rate", self.learning_rate)


@contextmanager
def seeded(seed: tuple[int, ...]) -> Iterator[None]:
    """Torch's generator set by a seed while the block runs; the caller's is left as it was."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        yield


def optimiser(
    model: nn.Module, *, second_beta: float = 0.95, epsilon: float = 1e-8, weight_decay: float = 0.1
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019), by default with the second beta common in language models.

    Vectors (biases, norms) do not decay; without decay it is Adam.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": weight_decay},
        {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
    ]
    made = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, second_beta), eps=epsilon)
    for one in parameters:
        # The state that the first step would make: a checkpoint has the same tensors at any time.
        zeros = {name: torch.zeros_like(one) for name in ("exp_avg", "exp_avg_sq")}
        made.state[one] = {"step": torch.tensor(0.0), **zeros}
    return made


def rate_at(step: int, *, peak: float, warmup: float) -> float:
    """peak · min(step/warmup, √(warmup/step)), steps from 1 on (Vaswani et al. 2017, eq. 3).

    It does not know when training ends, so that a run may always be taken further.
    """
    return peak * min(step / warmup, math.sqrt(warmup / step))


def update(model: nn.Module, optimiser: torch.optim.Optimizer, loss: Tensor, *, rate: float) -> bool:
    """One step of the optimiser at this rate, down the gradient of the loss; whether it was made.

    A gradient that is not finite changes nothing.
    """
    optimiser.zero_grad()
    loss.backward()
    length = nn.utils.clip_grad_norm_(model.parameters(), _LONGEST_GRADIENT)
    if not length.isfinite():
        return False
    for group in optimiser.param_groups:
        group["lr"] = rate
    optimiser.step()
    return True
