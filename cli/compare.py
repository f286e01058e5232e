"""`efficient-attn compare`: error, time and memory of every backend on the same q, k, v, and one sentence."""

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from efficient_attn.errors import OptionError

from . import outcome, talk
from .options import (
    BackendOption,
    DeviceOption,
    ExtraArguments,
    HeadDimOption,
    IsolateOption,
    JsonToOption,
    MemoryLimitOption,
    OutOption,
    RoundsOption,
    SeedOption,
    SetOption,
    ThreadsOption,
    TimeoutOption,
    as_json,
    isolation,
    names,
    refuse_extra,
)
from .plan import PlanOption, as_plan

OneInputOption = Annotated[
    str,
    typer.Option(
        "--inputs",
        metavar="NAME",
        help="encoder (shipped), stitched (four documents concatenated), gaussian or FILE.safetensors.",
    ),
]
ComparedLayerOption = Annotated[
    int | None,
    typer.Option(
        "--layer",
        min=0,
        metavar="N",
        help="One layer of the encoder or file. Default: errors on all layers, times on one.",
    ),
]
CutOption = Annotated[
    str | None,
    typer.Option("--seq-len", metavar="N", help="The first N tokens of the inputs; all if left out."),
]
MaxErrorOption = Annotated[
    float, typer.Option("--max-error", help="The relative error that the sentence asks about; 0.1 is 10 %.")
]
ComparedDrawsOption = Annotated[int, typer.Option("--draws", min=1, help="Draws of random features.")]
OneNormOption = Annotated[float, typer.Option("--norm", help="Gaussian inputs: q, k ~ N(0, S² I).")]
GaussianHeadsOption = Annotated[int, typer.Option("--num-heads", min=1, help="Heads of Gaussian inputs.")]
OneDtypeOption = Annotated[str, typer.Option("--dtype", help="What q, k and v are given in.")]


def compare_command(
    context: typer.Context,
    plan: PlanOption = None,
    extra: ExtraArguments = None,
    inputs: OneInputOption = "encoder",
    layer: ComparedLayerOption = None,
    seq_len: CutOption = None,
    max_error: MaxErrorOption = 0.1,
    backend: BackendOption = None,
    set_: SetOption = None,
    draws: ComparedDrawsOption = 4,
    norm: OneNormOption = 1.0,
    num_heads: GaussianHeadsOption = 8,
    head_dim: HeadDimOption = 64,
    dtype: OneDtypeOption = "float32",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    memory_limit: MemoryLimitOption = "70%",
    isolate: IsolateOption = None,
    timeout: TimeoutOption = "60s",
    rounds: RoundsOption = 8,
    out: OutOption = None,
    json_to: JsonToOption = None,
) -> None:
    """Error, time and memory of every backend on the same q, k, v: one table, one figure, one sentence.

    Example: efficient-attn compare --inputs stitched --backend window,my_file.py:my_attention
    """
    from efficient_attn.experiments import compare
    from efficient_attn.experiments.contest import contest
    from efficient_attn.experiments.files import open_folder, run_folder
    from efficient_attn.experiments.workload import Workload
    from efficient_attn.measure.environment import command_line
    from efficient_attn.sweep.amounts import parse_seconds, parse_sizes
    from efficient_attn.sweep.variants import parse_settings

    refuse_extra(extra)
    # What is wrong in the request itself is said before torch is loaded.
    tokens = None if seq_len is None else parse_sizes(seq_len, name="--seq-len")
    if tokens is not None and len(tokens) > 1:
        raise OptionError(f"--seq-len is one length, all at which everything is compared, not {seq_len!r}.")
    timeout_s = parse_seconds(timeout, name="--timeout")
    settings = parse_settings(set_ or [])
    isolate = isolation(isolate)
    to_stdout = as_json(json_to)
    named = names(backend)
    asked = contest(
        named,
        inputs=inputs,
        layer=layer,
        tokens=None if tokens is None else tokens[0],
        max_error=max_error,
        options=settings,
        draws=draws,
        norm=norm,
        workload=Workload(
            num_heads=num_heads, head_dim=head_dim, dtype=dtype, device=device, threads=threads, seed=seed
        ),
        memory_limit=memory_limit,
    )
    folder = open_folder(out or run_folder("compare"), name="--out", fresh=True)
    settled = {name: getattr(asked.workload, name) for name in ("device", "dtype", "threads")}
    # What a backend prints is talk: stdout holds results and nothing else.
    with talk.progress(asked.points) as show, redirect_stdout(sys.stderr):
        results = compare.run_compare(
            asked,
            out=folder,
            command=command_line(),
            plan=as_plan(context, settled | {"isolate": isolate}),
            progress=show,
            isolate=isolate,
            timeout_s=timeout_s,
            rounds=rounds,
        )
    outcome.finish(results, named, folder=folder, as_json=to_stdout)
