"""Plan of associative recall: every training, known before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from efficient_attn.contained import contained
from efficient_attn.errors import AttentionError, OptionError, UnsupportedError
from efficient_attn.problem import positive_count
from efficient_attn.runner.predicted_bytes import predict_bytes
from efficient_attn.runner.record import Case
from efficient_attn.runner.sizes import possible, with_size
from efficient_attn.runner.units import parse_sizes
from efficient_attn.runner.variants import DENSE, YARDSTICK, Variant, select
from efficient_attn.studies import options as shared
from efficient_attn.studies.plan import Plan, Point
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
    exclude: shared.Exclude = None,
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
    if workload.model_dim % 2:
        raise OptionError(
            f"num_heads={num_heads} times head_dim={head_dim} is odd; one half of a token is its key, the "
            "other its value."
        )
    variants, notes = _variants(backends, exclude, task, wanted, options, workload)
    same = {**vars(workload), "tokens": task.tokens, "inputs": course.name}
    # Seed by seed: an interrupted run has the same seeds of every backend.
    points = [
        _point(variant, {**same, "seed": seed + number}, course)
        for number in range(seeds)
        for variant in variants
    ]
    return Plan(points=points, notes=notes, settled={"threads": workload.threads})


def _point(variant: Variant, same: Mapping[str, Any], course: Course) -> Point:
    from efficient_attn.studies.recall import measure

    case = Case(kind="recall", backend=variant.backend, label=variant.label, options=variant.options, **same)
    return Point(
        case=case,
        measure=partial(measure.measure, case, variant.target, course),
        label=f"{case.label}, seed {case.seed}",
        series=case.label,
        predicted_bytes=predict_bytes(case, variant.memory_growth),
    )


def _variants(
    backends: Sequence[Any] | None,
    exclude: Sequence[str] | None,
    task: Task,
    sizes: Sequence[int],
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None,
    workload: Workload,
) -> tuple[tuple[Variant, ...], tuple[str, ...]]:
    """Exact attention, the controls, then every backend at every size; and notes on omitted sizes."""
    from efficient_attn.studies.recall.measure import MEAN

    given = dict(options or {})
    names = _default_names() if backends is None else list(backends)
    if _CLUSTERS in names and "window" not in given.get(_CLUSTERS, {}):
        # A window that reached the pairs would solve the task of the clusters.
        given[_CLUSTERS] = {"window": [max(task.gap // 4 * 4, 4)], **given.get(_CLUSTERS, {})}
    blind = select([_WINDOW], {_WINDOW: {"window": [task.blind_window(causal=workload.causal)]}})
    found = {one.label: one for one in (*select([YARDSTICK]), MEAN, *blind)}
    notes = []
    for variant in select(names, given, exclude=exclude):
        made, too_large = _sized(variant, sizes, task, workload)
        found |= {one.label: one for one in made}
        if too_large:
            shown = ", ".join(map(str, too_large))
            notes.append(f"{variant.label}: left out {shown}: a sequence has {task.tokens} tokens.")
    return tuple(found.values()), tuple(notes)


def _default_names() -> list[str]:
    """Softmax-approximating backends except naive attention; then other kernels."""
    from efficient_attn.backends import list_backends, spec

    near = [name for name in list_backends() if spec(name).capabilities.approximates_softmax]
    return [*(name for name in near if name != DENSE), *_OTHER_KERNELS]


def _sized(
    variant: Variant, sizes: Sequence[int], task: Task, workload: Workload
) -> tuple[list[Variant], list[int]]:
    """The variant at every possible size, and the impossible sizes."""
    from efficient_attn.backends import resolve

    option = resolve(variant.target).size_option
    if option is None or f"{option}=" in variant.label:
        return [_buildable(variant, task, workload)], []
    able = [size for size in sizes if possible(size, tokens=task.tokens, options=variant.options)]
    made = [_buildable(with_size(variant, option, size), task, workload, option) for size in able]
    return made, [size for size in sizes if size not in able]


def _buildable(variant: Variant, task: Task, workload: Workload, option: str | None = None) -> Variant:
    """The variant, built once as a trial; one size larger if the backend refuses it: a window is odd."""
    from efficient_attn.backends import build

    sizes = {"head_dim": workload.head_dim, "num_heads": workload.num_heads, "max_tokens": task.tokens}
    try:
        with contained():
            build(variant.target, **sizes, causal=workload.causal, **variant.options)
    except UnsupportedError:
        # An unsupported backend is a result and is recorded as one.
        return variant
    except OptionError:
        if option is None:
            raise
        size = variant.options[option] + 1
        label = variant.label.replace(f"{option}={size - 1}", f"{option}={size}")
        larger = replace(variant, label=label, options={**variant.options, option: size})
        return _buildable(larger, task, workload)
    except AttentionError:
        raise
    except Exception:
        # Other errors of an external builder are raised again, and recorded, by the measurement.
        return variant
    return variant
