"""Plan of a benchmark on several ranks: times of attention whose sequence the processes share."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.measure.environment import available_bytes, usable_cores
from efficient_attn.runner import record as records
from efficient_attn.runner.isolation import Measurer
from efficient_attn.runner.predicted_bytes import predict_bytes
from efficient_attn.runner.process_group import ProcessGroup
from efficient_attn.runner.record import Record
from efficient_attn.runner.units import parse_bytes
from efficient_attn.runner.variants import Variant, has_address
from efficient_attn.studies import options as shared
from efficient_attn.studies.costs import too_large
from efficient_attn.studies.plan import Plan, Point
from efficient_attn.studies.workload import Workload

# Lengths of a run on ranks.
LENGTHS = (2048, 8192)

UNDIVIDED = "bench interleaves the timing rounds of all backends on one machine; leave it out"

parse_ranks = shared.parse_numbers("whole numbers above 0, such as 1,2,4", lambda ranks: ranks > 0, int)


def threads_of(ranks: Sequence[int]) -> int:
    """Threads of a rank with which all ranks have a core for each, if there are enough."""
    return max(1, usable_cores() // max(ranks, default=1))


def check_ranks(ranks: Sequence[int], others: Mapping[str, Any]) -> None:
    """Refuse numbers that are none, and options of one process.

    Args:
        others: Options that ranks exclude, by name, where they are set.

    Raises:
        OptionError: If there is one.
    """
    if not ranks or not all(type(one) is int and one > 0 for one in ranks):
        raise OptionError(f"ranks are whole numbers above 0, such as 1,2,4, not {ranks!r}.")
    for name in (name for name, value in others.items() if value not in (None, False)):
        raise OptionError(f"ranks and {name} exclude each other: ranks time attention alone, in processes.")


def rank_plan(
    variants: Sequence[Variant],
    workload: Workload,
    lengths: Sequence[int],
    ranks: Sequence[int],
    *,
    rounds: int,
    memory_limit: str | int,
    timeout_s: float,
) -> Plan:
    """Times of every backend at every length and number of ranks, in interleaved rounds.

    A backend that is refused is dropped with its first refusal.

    Raises:
        OptionError: If a length is not divided by the ranks, or an object exists in this process only.
        UnsupportedError: If there are fewer GPUs than ranks.
    """
    ranks = sorted(set(ranks))
    for tokens, size in ((tokens, size) for tokens in lengths for size in ranks if tokens % size):
        raise OptionError(f"seq_lens: {tokens} tokens are not shared equally by {size} ranks.")
    for one in (one for one in variants if not has_address(one.target)):
        raise OptionError(f"ranks: {one.label!r} exists in this process only; name it as file.py:object.")
    _check_devices(workload.device, max(ranks))
    limit = parse_bytes(memory_limit, name="memory_limit", available=available_bytes(workload.device))
    group = ProcessGroup(
        ranks,
        workload.device,
        timeout_s=timeout_s,
        # A driver of CUDA reserves more addresses than any limit allows.
        limit_bytes=limit if workload.device == "cpu" else None,
    )
    measurer, refused = Measurer(timeout_s=timeout_s, process=group), set[str]()

    def observe(record: Record) -> None:
        if record.status == "unsupported":
            refused.add(record.case.label)

    points = []
    for tokens in lengths:
        for variant in variants:
            for size in ranks:
                case = variant.case(
                    kind="time", tokens=tokens, **vars(workload), inputs="gaussian", ranks=size
                )
                points.append(
                    Point(
                        case=case,
                        measure=partial(measurer, case, target=variant.target),
                        merge=joined,
                        rounds=rounds,
                        label=f"{case.label}, {tokens} tokens, {size} {'rank' if size == 1 else 'ranks'}",
                        group=tokens,
                        series=(case.label, size),
                        cost=case.batch * float(tokens) ** variant.time_growth / size,
                        skip=too_large(predict_bytes(case, variant.memory_growth), limit),
                        needed=partial(_is_new, refused, case.label),
                    )
                )
    return Plan(
        points=points,
        device=workload.device,
        timeout_s=timeout_s,
        notes=_notes(workload, max(ranks)),
        undivided=UNDIVIDED,
        resources=measurer,
        observe=observe,
    )


def _is_new(refused: set[str], label: str) -> bool:
    return label not in refused


def joined(parts: Sequence[Record]) -> Record:
    """The record of all rounds; the own work of a rank has as many times as the calls."""
    if parts[0].own_times_s is None:
        return records.joined(parts)
    own = [replace(part, measured={**part.measured, "times_s": part.own_times_s}) for part in parts]
    return records.replace(records.joined(parts), own_times_s=records.joined(own).times_s)


def _check_devices(device: str, most: int) -> None:
    """Refuse more ranks than GPUs, and a certain GPU."""
    if device == "cpu":
        return
    import torch

    if device != "cuda":
        raise OptionError(f"ranks take one GPU each, from the first on: device is cuda, not {device!r}.")
    if most > torch.cuda.device_count():
        raise UnsupportedError(
            f"ranks={most} need as many GPUs; this machine has {torch.cuda.device_count()}. Use device cpu."
        )


def _count(threads: int) -> str:
    return f"{threads} {'thread' if threads == 1 else 'threads'}"


def _notes(workload: Workload, most: int) -> list[str]:
    """A remark on ranks that share cores."""
    threads, cores = most * (workload.threads or 1), usable_cores()
    if workload.device != "cpu" or threads <= cores:
        return []
    return [
        f"More ranks than cores: {most} ranks of {_count(workload.threads or 1)} share {cores} cores; "
        "these times hold for this machine alone."
    ]
