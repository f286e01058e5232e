"""Associative recall: key-value pairs, then keys alone, whose values are the answers.

A sequence has `pairs` tokens with a key and a value, `gap` empty tokens, and `queries` tokens with an earlier
key and no value. No key occurs twice, and each class of values occurs equally often: a model that cannot look
up a key is right with probability 1 / `classes`, however long it is trained.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from efficient_attn.errors import OptionError
from efficient_attn.options import positive_number, whole_number
from efficient_attn.problem import positive_count

# Training and test sequences come from random streams that share no number.
LEARNED, TESTED = 0, 1


class Sequences(NamedTuple):
    """Sequences and the answers of their queries.

    Attributes:
        keys: [batch tokens], `task.keys` for no key.
        values: [batch tokens], `task.classes` for no value.
        answers: [batch queries], the values of the last keys.
    """

    keys: Any
    values: Any
    answers: Any


@dataclass(frozen=True, kw_only=True)
class Task:
    """Length of the sequences and number of distinct values.

    Attributes:
        gap: Empty tokens between pairs and queries; a window within the gap sees no pair.
    """

    pairs: int = 64
    classes: int = 16
    queries: int = 16
    gap: int = 16

    def __post_init__(self) -> None:
        for name in ("pairs", "classes", "queries"):
            positive_count(name, getattr(self, name))
        whole_number("gap", self.gap)
        if self.classes < 2:
            raise OptionError(
                f"classes is at least 2, not {self.classes}: one class leaves nothing to recall."
            )
        if self.pairs % self.classes:
            raise OptionError(
                f"pairs={self.pairs} is no multiple of classes={self.classes}, so that some values would "
                "come more often than others."
            )
        if self.queries > self.pairs:
            raise OptionError(
                f"queries={self.queries} is more than pairs={self.pairs}; no pair is asked for twice."
            )

    @property
    def keys(self) -> int:
        """Number of distinct keys: half of them are missing from a sequence."""
        return 2 * self.pairs

    @property
    def tokens(self) -> int:
        """Length of a sequence."""
        return self.pairs + self.gap + self.queries

    @property
    def chance(self) -> float:
        """Accuracy of guessing."""
        return 1 / self.classes

    def blind_window(self, *, causal: bool) -> int:
        """The widest window from which no query sees a pair."""
        return self.gap + 1 if causal else 2 * self.gap + 1

    def draw(self, batch: int, *, seed: int, stream: int, number: int) -> Sequences:
        """Sequences of one batch, a function of the arguments alone."""
        import numpy as np
        import torch

        random = np.random.default_rng([seed, stream, number])
        keys = _orders(random, batch, self.keys)[:, : self.pairs]
        values = _orders(random, batch, self.pairs) % self.classes
        asked = _orders(random, batch, self.pairs)[:, : self.queries]
        no_key, no_value = self.keys, self.classes
        silent = np.full((batch, self.gap), no_key)
        unknown = np.full((batch, self.gap + self.queries), no_value)
        drawn = (
            np.concatenate([keys, silent, np.take_along_axis(keys, asked, axis=1)], axis=1),
            np.concatenate([values, unknown], axis=1),
            np.take_along_axis(values, asked, axis=1),
        )
        return Sequences(*map(torch.from_numpy, drawn))


@dataclass(frozen=True, kw_only=True)
class Course:
    """Training configuration of every backend.

    Attributes:
        batch: Sequences per step.
        rate: Peak learning rate: linear warm-up over a tenth of the steps, then linear decay to 0.
    """

    task: Task
    steps: int
    batch: int
    rate: float

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            positive_count(name, getattr(self, name))
        positive_number("learning_rate", self.rate)

    @property
    def name(self) -> str:
        """Name of the inputs in records."""
        task = self.task
        return (
            f"recall(pairs={task.pairs}, classes={task.classes}, queries={task.queries}, gap={task.gap}, "
            f"steps={self.steps}, rate={self.rate:g})"
        )

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        rising = max(self.steps // 10, 1)
        return self.rate * min((step + 1) / rising, (self.steps - step) / max(self.steps - rising, 1))


def _orders(random: Any, batch: int, count: int) -> Any:
    """0 … count − 1 in a random order for each sequence, [batch count]."""
    return random.random((batch, count)).argsort(axis=1)
