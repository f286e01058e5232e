"""Associative recall: its task and its training.

A sequence has `pairs` tokens with a key and a value, GAP empty tokens, and QUERIES tokens with an earlier key
and no value. No key occurs twice, and each class of values occurs equally often: a model that cannot look up
a key is right with probability 1 / CLASSES, however long it is trained.
"""

from dataclasses import dataclass
from typing import Any

from efficient_attn.errors import OptionError
from efficient_attn.problem import positive_count

# A window within the gap sees no pair.
CLASSES = QUERIES = GAP = 16
# Sequences per step; peak learning rate; heads of the block and their width.
BATCH, RATE, NUM_HEADS, HEAD_DIM = 4, 0.01, 2, 16

# Training and test sequences come from random streams that share no number.
LEARNED, TESTED = 0, 1


@dataclass(frozen=True)
class Course:
    """Task and training of every backend."""

    pairs: int
    steps: int

    def __post_init__(self) -> None:
        positive_count("pairs", self.pairs)
        positive_count("steps", self.steps)
        if self.pairs % CLASSES:
            raise OptionError(
                f"pairs={self.pairs} is no multiple of {CLASSES}, so that some values would come more often."
            )

    @property
    def keys(self) -> int:
        """Number of distinct keys: half of them are missing from a sequence."""
        return 2 * self.pairs

    @property
    def tokens(self) -> int:
        return self.pairs + GAP + QUERIES

    @property
    def name(self) -> str:
        """Name of the inputs in records."""
        return (
            f"recall(pairs={self.pairs}, classes={CLASSES}, queries={QUERIES}, gap={GAP}, "
            f"steps={self.steps}, rate={RATE:g})"
        )

    def draw(self, batch: int, *, seed: int, stream: int, number: int) -> tuple[Any, Any, Any]:
        """Keys, values and answers of one batch, a function of the arguments alone.

        Keys and values are [batch tokens], with `keys` for no key and CLASSES for no value; answers are
        [batch queries], the values of the last keys.
        """
        import numpy as np
        import torch

        random = np.random.default_rng([seed, stream, number])

        def orders(count: int) -> Any:
            """0 … count − 1 in a random order for each sequence, [batch count]."""
            return random.random((batch, count)).argsort(axis=1)

        keys = orders(self.keys)[:, : self.pairs]
        values = orders(self.pairs) % CLASSES
        queried = orders(self.pairs)[:, :QUERIES]
        silent = np.full((batch, GAP), self.keys)
        unknown = np.full((batch, GAP + QUERIES), CLASSES)
        queries, answers = (np.take_along_axis(x, queried, axis=1) for x in (keys, values))
        shown = np.concatenate([keys, silent, queries], axis=1), np.concatenate([values, unknown], axis=1)
        return torch.from_numpy(shown[0]), torch.from_numpy(shown[1]), torch.from_numpy(answers)
