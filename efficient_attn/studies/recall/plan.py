"""Associative recall: its task, its training, and the plan of trainings seed by seed.

A sequence has `pairs` tokens with a key and a value, GAP empty tokens, and QUERIES tokens with an earlier key
and no value. No key occurs twice, and each class of values occurs equally often: a model that cannot look up
a key is right with probability 1 / CLASSES, however long it is trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from efficient_attn.errors import OptionError
from efficient_attn.measure.units import parse_sizes
from efficient_attn.measure.variants import DENSE, YARDSTICK, Variant, select
from efficient_attn.problem import positive_count
from efficient_attn.studies import options as shared
from efficient_attn.studies.study import Option, Plan, Point, in_lists
from efficient_attn.studies.workload import Workload, settle

# A window within the gap sees no pair.
CLASSES = QUERIES = GAP = 16
# Sequences per step; peak learning rate; heads of the block and their width.
BATCH, RATE, NUM_HEADS, HEAD_DIM = 4, 0.01, 2, 16

# Kernels that do not approximate softmax and are meant to be trained with.
_OTHER_KERNELS = ("linear-elu", "linear-taylor-2")
_CLUSTERS = "window-clusters"

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

    def rate_at(self, step: int) -> float:
        """Learning rate: linear warm-up over a tenth of the steps, then linear decay to 0."""
        rising = max(self.steps // 10, 1)
        return RATE * min((step + 1) / rising, (self.steps - step) / max(self.steps - rising, 1))

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


def plan(
    backends: shared.Backends = None,
    *,
    pairs: Annotated[int, Option(help="Number of key-value tokens; a multiple of 16.")] = 64,
    steps: Annotated[int, Option(help="Training steps of each block.")] = 300,
    seeds: shared.Seeds = 3,
    sizes: shared.Sizes = (32, 64, 128),
    causal: shared.Causal = False,
    options: shared.Settings = None,
    threads: shared.Threads = None,
    seed: shared.Seed = 0,
) -> Plan:
    """Train one block per backend on associative recall.

    Accuracy is compared with exact attention and with uniform attention, which cannot look keys up. Every
    backend starts from the same weights and sees the same sequences in the same order. Features are drawn
    once per seed and calibrated once.

    Example: efficient-attn recall --causal --backend window,my_file.py:my_attention
    """
    course = Course(pairs, steps)
    positive_count("seeds", seeds)
    workload = settle(
        Workload(
            of="block",
            batch=BATCH,
            num_heads=NUM_HEADS,
            head_dim=HEAD_DIM,
            causal=causal,
            backward=True,
            dtype="float32",
            device="cpu",
            threads=threads,
            seed=seed,
        )
    )
    variants = _variants(backends, course, parse_sizes(sizes, name="sizes"), options, causal)
    from efficient_attn.studies.recall import measure

    lists = []
    # Seed by seed: an interrupted run has the same seeds of every backend.
    for number in range(seeds):
        same = {**vars(workload), "tokens": course.tokens, "inputs": course.name, "seed": seed + number}
        points = []
        for variant in variants:
            case = variant.case(kind="recall", **same)
            call = partial(measure.measure, case, variant.target, course)
            label = f"{case.label}, seed {case.seed}"
            points.append(Point(case=case, measure=call, label=label, series=case.label))
        lists.append(points)
    return Plan(steps=partial(in_lists, lists))


def _variants(
    backends: Sequence[Any] | None,
    course: Course,
    sizes: Sequence[int],
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None,
    causal: bool,
) -> list[Variant]:
    """Exact and uniform attention, then every backend at every size up to the length of a sequence."""
    from efficient_attn.backends import compared_backends
    from efficient_attn.measure.accuracy import at_sizes
    from efficient_attn.measure.inputs import Subject, gaussian
    from efficient_attn.studies.recall.measure import MEAN

    settings = dict(options or {})
    if backends is None:
        backends = [*(name for name in compared_backends() if name != DENSE), *_OTHER_KERNELS]
    if _CLUSTERS in backends and "window" not in settings.get(_CLUSTERS, {}):
        # A window that reached the pairs would solve the task of the clusters.
        settings[_CLUSTERS] = {"window": [GAP], **settings.get(_CLUSTERS, {})}
    inputs = gaussian(norm=1.0, tokens=course.tokens, head_dim=HEAD_DIM, num_heads=NUM_HEADS)
    tried = Subject(name="", activations=inputs, scale=HEAD_DIM**-0.5, causal=causal)
    chosen = [
        variant for variant in select(backends, settings) for variant in at_sizes(variant, tried, sizes)
    ]
    return [*{variant.label: variant for variant in (*select([YARDSTICK]), MEAN, *chosen)}.values()]
