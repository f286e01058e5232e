"""Configuration that all models of a training run share, each model before its first step, and its update."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from efficient_attn.modules.options import positive_number, whole_number
from efficient_attn.problem import positive_count
from efficient_attn.runner.records import Case
from efficient_attn.runner.sizes import SEED
from efficient_attn.runner.variants import Variant
from efficient_attn.transformer.language_model import LanguageModel

# AdamW (Loshchilov and Hutter 2019) with the second beta that language models are commonly trained with.
_BETAS = (0.9, 0.95)
# The longest gradient: a batch that a model gets very wrong moves it no farther than others do.
_LONGEST_GRADIENT = 1.0
# Steps up to the peak learning rate, and positions of the models.
WARMUP, POSITIONS = 20, "rotary"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Model, optimiser and evaluation of a run; a learning curve follows from these and the text.

    Attributes:
        tokens: Bytes of a window.
        batch: Windows of a step.
        learning_rate: Peak, after the warm-up; it then falls with the root of the step.
        every: Steps from one evaluation, and one checkpoint, to the next.
        windows: Held-out windows of an evaluation.
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

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "model_dim", "num_heads", "num_layers", "every", "windows"):
            positive_count("seq_len" if name == "tokens" else name, getattr(self, name))
        whole_number("seed", self.seed)
        positive_number("learning_rate", self.learning_rate)


def build_model(variant: Variant, config: TrainConfig) -> LanguageModel:
    """The model before its first step; parameters that models of all backends have are the same in all."""
    # The stack gives each layer a seed of its own unless one is set.
    options = {name: value for name, value in variant.options.items() if name != SEED}
    seed = variant.options.get(SEED, config.seed)
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


def curve_case(variant: Variant, text: str, config: TrainConfig) -> Case:
    """The case of a variant's learning curve."""
    return variant.case(
        kind="train",
        of="encoder",
        layers=config.num_layers,
        batch=config.batch,
        num_heads=config.num_heads,
        head_dim=config.model_dim // config.num_heads,
        tokens=config.tokens,
        causal=True,
        backward=True,
        dtype="float32",
        device=config.device,
        threads=config.threads,
        inputs=text,
        seed=config.seed,
    )


@contextmanager
def seeded(seed: tuple[int, ...]) -> Iterator[None]:
    """Torch's generator set by a seed while the block runs; the caller's is left as it was."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        yield


def optimiser(model: nn.Module, *, weight_decay: float = 0.1) -> torch.optim.AdamW:
    """AdamW over the parameters of a model; vectors (biases, norms) do not decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": weight_decay},
        {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
    ]
    made = torch.optim.AdamW(groups, lr=1.0, betas=_BETAS)
    for one in parameters:
        # The state that the first step would make: a checkpoint has the same tensors at any time.
        zeros = {name: torch.zeros_like(one) for name in ("exp_avg", "exp_avg_sq")}
        made.state[one] = {"step": torch.tensor(0.0), **zeros}
    return made


def rate_at(step: int, *, peak: float, warmup: int) -> float:
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
