"""Configuration that all models of a training run share, and each model before its first step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from efficient_attn.errors import OptionError
from efficient_attn.modules.options import whole_number
from efficient_attn.problem import positive_count
from efficient_attn.runner.records import Case
from efficient_attn.runner.sizes import SEED
from efficient_attn.runner.variants import Variant
from efficient_attn.transformer.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Model, optimiser and evaluation of a run; a learning curve follows from these and the text.

    Attributes:
        tokens: Bytes of a window.
        batch: Windows of a step.
        positions: Position encoding, as for `Encoder`.
        learning_rate: Peak, after `warmup` steps; it then falls with the root of the step.
        every: Steps from one evaluation, and one checkpoint, to the next.
        windows: Held-out windows of an evaluation.
        seed: Random seed of weights, batches and features.
    """

    tokens: int
    batch: int
    model_dim: int
    num_heads: int
    num_layers: int
    positions: str
    learning_rate: float
    warmup: int
    every: int
    windows: int
    seed: int
    device: str
    threads: int

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "model_dim", "num_heads", "num_layers", "warmup", "every", "windows"):
            positive_count("seq_len" if name == "tokens" else name, getattr(self, name))
        whole_number("seed", self.seed)
        if not 0 < self.learning_rate < float("inf"):
            raise OptionError(f"learning_rate is a finite number above 0, not {self.learning_rate!r}.")


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
            positions=config.positions,
            max_tokens=config.tokens,
            seed=seed,
            **options,
        )


def case_of(variant: Variant, text: str, config: TrainConfig) -> Case:
    """The case of a variant's learning curve."""
    return Case(
        kind="train",
        backend=variant.backend,
        label=variant.label,
        options=variant.options,
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
