"""Plan of associative recall: trainings seed by seed."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from efficient_attn.measure.units import parse_sizes
from efficient_attn.measure.variants import DENSE, YARDSTICK, Variant, select
from efficient_attn.problem import positive_count
from efficient_attn.studies import options as shared
from efficient_attn.studies.points import Plan, Point, in_lists
from efficient_attn.studies.recall.task import Course, Task
from efficient_attn.studies.study import Option
from efficient_attn.studies.workload import Workload, settle

# Kernels that do not approximate softmax and are meant to be trained with.
_OTHER_KERNELS = ("linear-elu", "linear-taylor-2")
_WINDOW, _CLUSTERS = "window", "window-clusters"


def plan(
    backends: shared.Backends = None,
    *,
    pairs: Annotated[int, Option(help="Number of key-value tokens; a multiple of classes.")] = Task.pairs,
    steps: Annotated[int, Option(help="Training steps of each block.")] = 300,
    seeds: shared.Seeds = 3,
    sizes: shared.Sizes = (32, 64, 128),
    causal: shared.Causal = False,
    options: shared.Settings = None,
    classes: Annotated[int, Option(help="Number of distinct values; chance is 1 / classes.")] = Task.classes,
    queries: Annotated[int, Option(help="Number of keys whose value is asked for.")] = Task.queries,
    gap: Annotated[int, Option(help="Number of empty tokens between pairs and queries.")] = Task.gap,
    batch: shared.Batch = 4,
    num_heads: shared.NumHeads = 2,
    head_dim: shared.HeadDim = 16,
    learning_rate: shared.LearningRate = 0.01,
    threads: shared.Threads = None,
    seed: shared.Seed = 0,
) -> Plan:
    """Train one block per backend on associative recall.

    Accuracy is compared with exact attention and with controls. Every backend starts from the same weights
    and sees the same sequences in the same order. Random features are drawn once per seed; calibration is
    made once, before training. The default selection is all backends that approximate softmax and two
    kernels that do not.

    Example: efficient-attn recall --causal --backend window,my_file.py:my_attention
    """
    task = Task(pairs=pairs, classes=classes, queries=queries, gap=gap)
    course = Course(task=task, steps=steps, batch=batch, rate=learning_rate)
    positive_count("seeds", seeds)
    wanted = parse_sizes(sizes, name="sizes")
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
    variants = _variants(backends, task, wanted, options, workload)
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

    given = dict(options or {})
    names = _default_names() if backends is None else list(backends)
    if _CLUSTERS in names and "window" not in given.get(_CLUSTERS, {}):
        # A window that reached the pairs would solve the task of the clusters.
        given[_CLUSTERS] = {"window": [max(task.gap // 4 * 4, 4)], **given.get(_CLUSTERS, {})}
    blind = select([_WINDOW], {_WINDOW: {"window": [task.blind_window(causal=workload.causal)]}})
    inputs = gaussian(norm=1.0, tokens=task.tokens, head_dim=workload.head_dim, num_heads=workload.num_heads)
    tried = Subject(name="", activations=inputs, scale=workload.head_dim**-0.5, causal=workload.causal)
    chosen = [one for variant in select(names, given) for one in at_sizes(variant, tried, sizes)]
    return tuple({one.label: one for one in (*select([YARDSTICK]), MEAN, *blind, *chosen)}.values())


def _default_names() -> list[str]:
    """Softmax-approximating backends except naive attention; then other kernels."""
    from efficient_attn.backends import list_backends, spec

    near = [name for name in list_backends() if spec(name).capabilities.approximates_softmax]
    return [*(name for name in near if name != DENSE), *_OTHER_KERNELS]
