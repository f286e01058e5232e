"""Associative recall: its task, the training configuration, and the plan of trainings seed by seed.

A sequence has `pairs` tokens with a key and a value, `gap` empty tokens, and `queries` tokens with an earlier
key and no value. No key occurs twice, and each class of values occurs equally often: a model that cannot look
up a key is right with probability 1 / `classes`, however long it is trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

from efficient_attn.errors import OptionError
from efficient_attn.measure.units import parse_sizes
from efficient_attn.measure.variants import DENSE, YARDSTICK, Variant, select
from efficient_attn.options import positive_number, whole_number
from efficient_attn.problem import positive_count
from efficient_attn.studies import options as shared
from efficient_attn.studies.study import Option, Plan, Point, in_lists
from efficient_attn.studies.workload import Workload, settle

# Kernels that do not approximate softmax and are meant to be trained with.
_OTHER_KERNELS = ("linear-elu", "linear-taylor-2")
_WINDOW, _CLUSTERS = "window", "window-clusters"

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
        return self.pairs + self.gap + self.queries

    @property
    def chance(self) -> float:
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
        queried = _orders(random, batch, self.pairs)[:, : self.queries]
        no_key, no_value = self.keys, self.classes
        silent = np.full((batch, self.gap), no_key)
        unknown = np.full((batch, self.gap + self.queries), no_value)
        drawn = (
            np.concatenate([keys, silent, np.take_along_axis(keys, queried, axis=1)], axis=1),
            np.concatenate([values, unknown], axis=1),
            np.take_along_axis(values, queried, axis=1),
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
        rising = max(self.steps // 10, 1)
        return self.rate * min((step + 1) / rising, (self.steps - step) / max(self.steps - rising, 1))


def _orders(random: Any, batch: int, count: int) -> Any:
    """0 … count − 1 in a random order for each sequence, [batch count]."""
    return random.random((batch, count)).argsort(axis=1)


def plan(
    backends: shared.Backends = None,
    *,
    pairs: Annotated[int, Option(help="Number of key-value tokens; a multiple of classes.")] = Task.pairs,
    steps: Annotated[int, Option(help="Training steps of each block.")] = 300,
    seeds: shared.Seeds = 3,
    sizes: shared.Sizes = (32, 64, 128),
    causal: shared.Causal = False,
    options: shared.Settings = None,
    classes: Annotated[int, Option(help="Distinct values; chance is 1 / classes.", rare=True)] = Task.classes,
    queries: Annotated[int, Option(help="Keys at the end, which are looked up.", rare=True)] = Task.queries,
    gap: Annotated[int, Option(help="Empty tokens between pairs and queries.", rare=True)] = Task.gap,
    batch: int = 4,
    num_heads: shared.NumHeads = 2,
    head_dim: shared.HeadDim = 16,
    learning_rate: float = 0.01,
    threads: shared.Threads = None,
    seed: shared.Seed = 0,
) -> Plan:
    """Train one block per backend on associative recall.

    Accuracy is compared with exact attention and with controls. Every backend starts from the same weights
    and sees the same sequences in the same order. Features are drawn once per seed and calibrated once.

    Example: efficient-attn recall --causal --backend window,my_file.py:my_attention
    """
    task = Task(pairs=pairs, classes=classes, queries=queries, gap=gap)
    course = Course(task=task, steps=steps, batch=batch, rate=learning_rate)
    positive_count("seeds", seeds)
    all_sizes = parse_sizes(sizes, name="sizes")
    workload = settle(
        Workload(
            of="block",
            batch=batch,
            num_heads=num_heads,
            head_dim=head_dim,
            causal=causal,
            backward=True,
            dtype="float32",
            device="cpu",
            threads=threads,
            seed=seed,
        )
    )
    variants = _variants(backends, task, all_sizes, options, workload)
    same = {**vars(workload), "tokens": task.tokens, "inputs": course.name}
    # Seed by seed: an interrupted run has the same seeds of every backend.
    lists = [
        [_point(variant, {**same, "seed": seed + number}, course) for variant in variants]
        for number in range(seeds)
    ]
    return Plan(steps=partial(in_lists, lists))


def _point(variant: Variant, same: Mapping[str, Any], course: Course) -> Point:
    from efficient_attn.studies.recall import measure

    case = variant.case(kind="recall", **same)
    return Point(
        case=case,
        measure=partial(measure.measure, case, variant.target, course),
        label=f"{case.label}, seed {case.seed}",
        series=case.label,
    )


def _variants(
    backends: Sequence[Any] | None,
    task: Task,
    sizes: Sequence[int],
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None,
    workload: Workload,
) -> tuple[Variant, ...]:
    """Exact attention, the controls, then every backend at every size up to the length of a sequence."""
    from efficient_attn.measure.accuracy import at_sizes
    from efficient_attn.measure.inputs import Subject, gaussian
    from efficient_attn.studies.recall.measure import MEAN

    settings = dict(options or {})
    names = _default_names() if backends is None else list(backends)
    if _CLUSTERS in names and "window" not in settings.get(_CLUSTERS, {}):
        # A window that reached the pairs would solve the task of the clusters.
        settings[_CLUSTERS] = {"window": [max(task.gap // 4 * 4, 4)], **settings.get(_CLUSTERS, {})}
    blind = select([_WINDOW], {_WINDOW: {"window": [task.blind_window(causal=workload.causal)]}})
    inputs = gaussian(norm=1.0, tokens=task.tokens, head_dim=workload.head_dim, num_heads=workload.num_heads)
    tried = Subject(name="", activations=inputs, scale=workload.head_dim**-0.5, causal=workload.causal)
    chosen = [variant for variant in select(names, settings) for variant in at_sizes(variant, tried, sizes)]
    return tuple(
        {variant.label: variant for variant in (*select([YARDSTICK]), MEAN, *blind, *chosen)}.values()
    )


def _default_names() -> list[str]:
    """Softmax-approximating backends except naive attention; then other kernels."""
    from efficient_attn.backends import compared_backends

    return [*(name for name in compared_backends() if name != DENSE), *_OTHER_KERNELS]
