"""What the models of a training run have in common, and each of them before its first step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from efficient_attn.errors import OptionError
from efficient_attn.experiments.workload import Workload, settle
from efficient_attn.modules.options import whole_number
from efficient_attn.problem import positive_count
from efficient_attn.sweep.records import Case
from efficient_attn.sweep.sizes import SEED
from efficient_attn.sweep.variants import Variant
from efficient_attn.transformer.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class Course:
    """What every model of a run is, and what is done with it; the curve follows from this and the text.

    Attributes:
        tokens: Of one window: a byte is read with at most so many before it.
        batch: Windows of one step.
        positions: As for `Encoder`.
        learning_rate: At its peak, after `warmup` steps; it then falls with the root of the step.
        every: Steps from one evaluation, and one checkpoint, to the next.
        windows: Held-out windows of an evaluation.
        redraw_every: Steps after which random features are drawn, and calibrated, anew; 0: never.
        seed: Of weights, batches and features.
    """

    tokens: int = 256
    batch: int = 8
    model_dim: int = 64
    num_heads: int = 4
    num_layers: int = 2
    positions: str = "rotary"
    learning_rate: float = 0.01
    warmup: int = 20
    every: int = 20
    windows: int = 64
    redraw_every: int = 0
    seed: int = 0
    device: str = "cpu"
    threads: int = 1


def course(*, device: str = "cpu", threads: int | None = None, **chosen: Any) -> Course:
    """The course with device and threads settled.

    Raises:
        OptionError, DtypeError, UnsupportedError: If something makes no sense.
    """
    for name in ("tokens", "batch", "model_dim", "num_heads", "num_layers", "warmup", "every", "windows"):
        positive_count(name, chosen.get(name, getattr(Course, name)))
    for name in ("redraw_every", "seed"):
        whole_number(name, chosen.get(name, getattr(Course, name)))
    rate = chosen.get("learning_rate", Course.learning_rate)
    if not 0 < rate < float("inf"):
        raise OptionError(f"learning_rate is a finite number above 0, not {rate!r}.")
    machine = settle(Workload(device=device, threads=threads, dtype="float32"))
    return Course(device=machine.device, threads=machine.threads or 1, **chosen)


def build_model(variant: Variant, course: Course) -> LanguageModel:
    """The model before its first step; all that models of other backends have too is the same in all."""
    # The stack gives each layer a seed of its own where it is not told one.
    options = {name: value for name, value in variant.options.items() if name != SEED}
    seed = variant.options.get(SEED, course.seed)
    with drawing((course.seed,)):
        return LanguageModel(
            course.model_dim,
            course.num_heads,
            variant.target,
            num_layers=course.num_layers,
            positions=course.positions,
            max_tokens=course.tokens,
            seed=seed,
            **options,
        )


def case_of(variant: Variant, text: str, course: Course) -> Case:
    """What the curve of a variant is a measurement of."""
    return Case(
        kind="train",
        backend=variant.backend,
        label=variant.label,
        options=variant.options,
        of="encoder",
        layers=course.num_layers,
        batch=course.batch,
        num_heads=course.num_heads,
        head_dim=course.model_dim // course.num_heads,
        tokens=course.tokens,
        causal=True,
        backward=True,
        dtype="float32",
        device=course.device,
        threads=course.threads,
        inputs=text,
        seed=course.seed,
    )


@contextmanager
def drawing(seed: tuple[int, ...]) -> Iterator[None]:
    """Torch's generator set by a seed while the block runs; the caller's is left as it was."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        yield
