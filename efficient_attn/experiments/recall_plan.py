"""What `recall` is going to train: every record to come, known before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from efficient_attn.analysis.curves import DENSE, YARDSTICK
from efficient_attn.contained import contained
from efficient_attn.errors import AttentionError, OptionError, UnsupportedError
from efficient_attn.experiments.recall_task import Course, Task
from efficient_attn.experiments.workload import Workload, settle
from efficient_attn.problem import positive_count
from efficient_attn.sweep.amounts import parse_sizes
from efficient_attn.sweep.plan import Entry, predict_bytes
from efficient_attn.sweep.records import Case
from efficient_attn.sweep.sizes import possible, with_size
from efficient_attn.sweep.variants import Variant, select

# Beside all that is meant to come near softmax: kernels that are not, and want to be trained with.
_OTHER_KERNELS = ("linear-elu", "linear-taylor-2")
_WINDOW, _CLUSTERS = "window", "window-clusters"


@dataclass(frozen=True, kw_only=True)
class Trainings:
    """What is going to be trained.

    Attributes:
        entries: Seed by seed, so that an interrupted run has the same seeds of all that it has.
        course: How each of them is trained.
        notes: What is left out, and why.
    """

    entries: tuple[Entry, ...]
    course: Course
    notes: tuple[str, ...]


def plan_recall(
    backends: Sequence[Any] | None,
    course: Course,
    *,
    seeds: int,
    sizes: str | Sequence[int],
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None,
    causal: bool,
    num_heads: int,
    head_dim: int,
    threads: int | None,
    seed: int,
) -> Trainings:
    """Everything that is to be trained; nothing runs."""
    positive_count("seeds", seeds)
    wanted = parse_sizes(sizes, name="sizes")
    workload = settle(
        Workload(
            of="block",
            batch=course.batch,
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
    if workload.num_heads * workload.head_dim % 2:
        raise OptionError(
            f"num_heads={num_heads} times head_dim={head_dim} is odd; one half of a token is its key, the "
            "other its value."
        )
    variants, notes = _variants(backends, course.task, wanted, options, workload)
    shared = {**vars(workload), "tokens": course.task.tokens, "inputs": course.name}
    entries = (
        _entry(variant, {**shared, "seed": seed + number}) for number in range(seeds) for variant in variants
    )
    return Trainings(entries=tuple(entries), course=course, notes=notes)


def _entry(variant: Variant, shared: Mapping[str, Any]) -> Entry:
    case = Case(
        kind="recall", backend=variant.backend, label=variant.label, options=variant.options, **shared
    )
    return Entry(case=case, variant=variant, predicted_bytes=predict_bytes(case, variant.memory_growth))


def _variants(
    backends: Sequence[Any] | None,
    task: Task,
    sizes: Sequence[int],
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None,
    workload: Workload,
) -> tuple[tuple[Variant, ...], tuple[str, ...]]:
    """Exact attention, the controls, then every backend at every size; and what was left out."""
    from efficient_attn.experiments.recall_training import MEAN

    given = dict(options or {})
    names = _default_names() if backends is None else list(backends)
    if _CLUSTERS in names and "window" not in given.get(_CLUSTERS, {}):
        # A window that reached the pairs would do what the clusters are to be tested at.
        given[_CLUSTERS] = {"window": [max(task.gap // 4 * 4, 4)], **given.get(_CLUSTERS, {})}
    blind = select([_WINDOW], {_WINDOW: {"window": [task.blind_window(causal=workload.causal)]}})
    found = {one.label: one for one in (*select([YARDSTICK]), MEAN, *blind)}
    notes = []
    for variant in select(names, given):
        made, too_large = _sized(variant, sizes, task, workload)
        found |= {one.label: one for one in made}
        if too_large:
            shown = ", ".join(map(str, too_large))
            notes.append(f"{variant.label}: left out {shown}: a sequence has {task.tokens} tokens.")
    return tuple(found.values()), tuple(notes)


def _default_names() -> list[str]:
    """All that is meant to come near softmax but for exact attention in another way; then other kernels."""
    from efficient_attn.backends import list_backends, spec

    near = [name for name in list_backends() if spec(name).capabilities.approximates_softmax]
    return [*(name for name in near if name != DENSE), *_OTHER_KERNELS]


def _sized(
    variant: Variant, sizes: Sequence[int], task: Task, workload: Workload
) -> tuple[list[Variant], list[int]]:
    """The variant at every size that makes sense, and the sizes that make none."""
    from efficient_attn.backends import resolve

    option = resolve(variant.target).size_option
    if option is None or f"{option}=" in variant.label:
        return [_buildable(variant, task, workload)], []
    able = [size for size in sizes if possible(size, tokens=task.tokens, options=variant.options)]
    made = [_buildable(with_size(variant, option, size), task, workload, option) for size in able]
    return made, [size for size in sizes if size not in able]


def _buildable(variant: Variant, task: Task, workload: Workload, option: str | None = None) -> Variant:
    """The variant, tried once; at a size more where the backend refuses its own: a window is odd."""
    from efficient_attn.backends import build

    sizes = {"head_dim": workload.head_dim, "num_heads": workload.num_heads, "max_tokens": task.tokens}
    try:
        with contained():
            build(variant.target, **sizes, causal=workload.causal, **variant.options)
    except UnsupportedError:
        # No promise was made: that is a result, and is recorded as one.
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
        # Whatever somebody else's builder raises is raised again where it is recorded.
        return variant
    return variant
