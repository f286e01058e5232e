"""Plan of a benchmark: times and peak memory, length by length."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

from efficient_attn.contained import trial
from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.measure.clock import COLD, L2
from efficient_attn.measure.isolation import DEFAULT_ISOLATION, DEFAULT_TIMEOUT_S
from efficient_attn.measure.record import COMPILED, CUDA_GRAPH
from efficient_attn.measure.units import parse_sizes
from efficient_attn.measure.variants import YARDSTICK, Variant, ceiling, is_ours, select
from efficient_attn.studies import options as shared
from efficient_attn.studies.costs import Costs, measurer_for
from efficient_attn.studies.points import Plan, Point, Steps
from efficient_attn.studies.study import Option
from efficient_attn.studies.workload import SUBJECTS, Workload, workloads


def plan(
    backends: shared.Backends = None,
    *,
    seq_lens: shared.SeqLens = (256, 512, 1024, 2048, 4096),
    of: Annotated[
        str | Sequence[str],
        Option(
            help="Attention alone, in a block, in a stack of blocks; several: a,b.",
            metavar="|".join(SUBJECTS),
            parse=shared.parse_words,
        ),
    ] = "attention",
    layers: Annotated[int | None, Option(help="Blocks of an encoder; 3.", least=1)] = None,
    backward: shared.Backward = False,
    causal: shared.Causal = False,
    batch: shared.Batch = 1,
    num_heads: shared.NumHeads = 8,
    head_dim: shared.HeadDim = 64,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    threads: shared.Threads = None,
    compile: Annotated[bool, Option(help="Measure every backend compiled by torch.compile too.")] = False,
    cuda_graph: Annotated[bool, Option(help="Measure every backend replayed from a CUDA graph too.")] = False,
    l2: Annotated[
        str | None,
        Option(
            help="L2 cache of a GPU when a call begins whose device time is measured; cold.",
            metavar="|".join(L2),
        ),
    ] = None,
    options: shared.Settings = None,
    exclude: shared.Exclude = None,
    rounds: shared.Rounds = 4,
    memory_limit: shared.MemoryLimit = "70%",
    isolate: shared.Isolate = DEFAULT_ISOLATION,
    timeout_s: shared.Timeout = DEFAULT_TIMEOUT_S,
    seed: shared.Seed = 0,
) -> Plan:
    """Measure time and peak memory of backends at several lengths.

    Points are measured in a child process, so that a crash costs one record; an object that exists in this
    process only, such as a function of a notebook, is measured here, and all others with it.

    Example: efficient-attn bench --seq-len 256:4096:x2 --backend window,own.py:attend

    Example: efficient-attn bench --backend new.py:attend,old.py:attend --rounds 16
    """
    lengths = parse_sizes(seq_lens, name="seq_lens")
    settled = workloads(
        Workload(
            layers=layers,
            batch=batch,
            num_heads=num_heads,
            head_dim=head_dim,
            causal=causal,
            backward=backward,
            dtype=dtype,
            device=device,
            threads=threads,
            seed=seed,
        ),
        of=of,
    )
    first = settled[0]
    executions = [None, *([CUDA_GRAPH] if cuda_graph else []), *([COMPILED] if compile else [])]
    _check_device(first.device, executions, l2)
    # Calls are made where their time is limited, and their failures are records.
    chosen = select(backends, options, rehearse=False, exclude=exclude, also=True)
    if not any(variant.backend == YARDSTICK for variant in chosen):
        chosen = (*select([YARDSTICK]), *chosen)
    # The baseline comes first, in case the budget ends.
    chosen = tuple(sorted(chosen, key=lambda variant: variant.backend != YARDSTICK))
    measurer, limit, notes = measurer_for(
        chosen, first, isolate=isolate, timeout_s=timeout_s, memory_limit=memory_limit
    )
    settings = []
    for workload in settled:
        _try_options(chosen, workload, max(lengths))
        costs = Costs(
            shared={**vars(workload), "inputs": "gaussian"},
            measure=measurer,
            rounds=rounds,
            limit_bytes=limit,
            l2=(l2 or COLD) if first.device.startswith("cuda") else None,
        )
        settings.append((costs, chosen if workload.of == "attention" else (ceiling(), *chosen)))
    # From short to long; compiling, which takes longest, comes last.
    groups = [
        (costs, [variant.executed(execution) for variant in variants], tokens)
        for execution in executions
        for tokens in lengths
        for costs, variants in settings
    ]
    return Plan(
        steps=partial(_steps, groups),
        device=first.device,
        timeout_s=timeout_s,
        notes=notes,
        resources=measurer,
    )


def _steps(groups: Sequence[tuple[Costs, Sequence[Variant], int]]) -> Steps:
    """One round of every call and its memory, then further rounds of all calls."""
    calls: list[Point] = []
    for costs, variants, tokens in groups:
        times = [costs.time(variant, tokens) for variant in variants]
        records = yield [replace(point, rounds=1) for point in times]
        calls += [point for point, record in zip(times, records, strict=True) if record.status == "ok"]
        for variant in variants:
            # The memory of a graph is allocated when it is captured, none of it in a call.
            if variant.execution != CUDA_GRAPH:
                yield costs.memory(variant, tokens)
    yield calls


def _check_device(device: str, executions: Sequence[str | None], l2: str | None) -> None:
    """Refuse options that only a GPU has on another device, and unknown states of its cache."""
    if l2 not in (None, *L2):
        raise OptionError(f"l2 is {' or '.join(L2)}, not {l2!r}.")
    asked = "l2" if l2 is not None else "cuda_graph" if CUDA_GRAPH in executions else None
    if asked is not None and not device.startswith("cuda"):
        raise UnsupportedError(f"{asked} needs a CUDA device; device is {device!r}.")


def _try_options(variants: Sequence[Variant], workload: Workload, longest: int) -> None:
    """Build each of our variants with set options once; others are built where their time is limited."""
    from efficient_attn.backends import build

    for variant in variants:
        if variant.label != variant.backend and is_ours(variant.target):
            with trial():
                build(
                    variant.target,
                    head_dim=workload.head_dim,
                    num_heads=workload.num_heads,
                    max_tokens=longest,
                    causal=workload.causal,
                    **variant.options,
                )
