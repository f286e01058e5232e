"""`efficient-attn bench`: time and peak memory, length by length."""

import sys
from contextlib import redirect_stdout
from typing import Any

import typer

from efficient_attn.errors import OptionError

from . import outcome, talk
from .options import (
    BackendOption,
    BackwardOption,
    BatchOption,
    BenchHeadDimOption,
    BudgetOption,
    CausalOption,
    DeviceOption,
    DryRunOption,
    DtypeOption,
    ExtraArguments,
    ForceResumeOption,
    IsolateOption,
    JsonToOption,
    LayersOption,
    MemoryLimitOption,
    ModelDimOption,
    NumHeadsOption,
    OfOption,
    OutOption,
    ResumeOption,
    RoundsOption,
    SeedOption,
    SeqLenOption,
    SetOption,
    ThreadsOption,
    TimeoutOption,
    as_json,
    isolation,
    names,
    refuse_extra,
)
from .plan import PlanOption, as_plan


def bench_command(
    context: typer.Context,
    plan: PlanOption = None,
    extra: ExtraArguments = None,
    seq_len: SeqLenOption = "256:4096:x2",
    backend: BackendOption = None,
    set_: SetOption = None,
    of: OfOption = "attention",
    layers: LayersOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    causal: CausalOption = False,
    backward: BackwardOption = False,
    num_heads: NumHeadsOption = "8",
    head_dim: BenchHeadDimOption = None,
    model_dim: ModelDimOption = None,
    batch: BatchOption = 1,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    budget: BudgetOption = "90s",
    memory_limit: MemoryLimitOption = "70%",
    isolate: IsolateOption = None,
    timeout: TimeoutOption = "60s",
    rounds: RoundsOption = 4,
    out: OutOption = None,
    resume: ResumeOption = False,
    force_resume: ForceResumeOption = False,
    dry_run: DryRunOption = False,
    json_to: JsonToOption = None,
) -> None:
    """Measure time and peak memory of backends at several lengths, beside fused exact attention.

    Example: efficient-attn bench --seq-len 256:4096:x2 --backend window,my_file.py:my_attention
    """
    from efficient_attn.experiments import bench
    from efficient_attn.experiments.files import open_folder, run_folder
    from efficient_attn.measure.environment import command_line
    from efficient_attn.sweep.amounts import parse_seconds, parse_sizes
    from efficient_attn.sweep.variants import parse_settings

    refuse_extra(extra, "--seq-len 256,512")
    # What is wrong in the request itself is said before torch is loaded.
    parse_sizes(seq_len, name="--seq-len")
    parse_sizes(num_heads, name="--num-heads")
    budget_s = parse_seconds(budget, name="--budget")
    timeout_s = parse_seconds(timeout, name="--timeout")
    settings = parse_settings(set_ or [])
    isolate = isolation(isolate)
    to_stdout = as_json(json_to)
    resume = resume or force_resume
    if resume and out is None:
        raise OptionError("--resume needs --out, the folder of the run to go on with.")
    asked = bench.Workload(
        layers=layers,
        batch=batch,
        causal=causal,
        backward=backward,
        dtype=dtype,
        device=device,
        threads=threads,
        seed=seed,
    )
    called = {"num_heads": "--num-heads", "head_dim": "--head-dim", "model_dim": "--model-dim"}
    workloads = bench.workloads(
        asked, of=of, num_heads=num_heads, head_dim=head_dim, model_dim=model_dim, names=called
    )
    named = names(backend)
    entries = bench.plan_bench(
        named,
        seq_len,
        workloads,
        options=settings,
        memory_limit=memory_limit,
        names=("--seq-len", "--memory-limit"),
    )
    if dry_run:
        talk.print_tables([_plan_table(entries)])
        return
    folder = open_folder(out or run_folder("bench"), name="--out", fresh=not resume)
    # What a backend prints is talk: stdout holds results and nothing else.
    with talk.progress(len(entries)) as show, redirect_stdout(sys.stderr):
        results = bench.run_bench(
            entries,
            budget_s=budget_s,
            out=folder,
            command=command_line(),
            plan=as_plan(context, _settled(workloads[-1], isolate)),
            progress=show,
            isolate=isolate,
            timeout_s=timeout_s,
            rounds=rounds,
            resume=resume,
            force_resume=force_resume,
        )
    outcome.finish(results, named, folder=folder, as_json=to_stdout)


def _settled(workload: Any, isolate: str) -> dict[str, Any]:
    """What was decided where the flags left it open, the same for everything that is measured."""
    return {name: getattr(workload, name) for name in ("device", "dtype", "threads")} | {"isolate": isolate}


def _plan_table(entries: Any) -> Any:
    from efficient_attn.report.table import Table
    from efficient_attn.sweep.amounts import show_bytes

    rows = [
        (
            entry.case.label,
            str(entry.case.tokens),
            entry.case.kind,
            show_bytes(entry.predicted_bytes),
            entry.skip or "",
        )
        for entry in entries
    ]
    columns = ("backend", "tokens", "measured", "predicted bytes", "skipped because it")
    return Table(f"{len(entries)} points; nothing was run", columns, tuple(rows))
