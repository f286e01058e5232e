"""`efficient-attn compare`: error, time and memory of every backend on the same q, k, v, and one sentence."""

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Annotated, Any

import typer

from efficient_attn.errors import OptionError

from . import exits, talk
from .options import (
    BackendOption,
    DeviceOption,
    ExtraArguments,
    HeadDimOption,
    IsolateOption,
    JsonToOption,
    MemoryLimitOption,
    OneLayerOption,
    OutOption,
    RoundsOption,
    SeedOption,
    SetOption,
    ThreadsOption,
    TimeoutOption,
    names,
)
from .plan import PlanOption, as_plan

OneInputOption = Annotated[
    str,
    typer.Option(
        "--inputs",
        metavar="NAME",
        help="encoder (shipped), stitched (its four texts end to end), gaussian or FILE.safetensors.",
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
    layer: OneLayerOption = None,
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
    rounds: RoundsOption = 4,
    out: OutOption = None,
    json_to: JsonToOption = None,
) -> None:
    """Error, time and memory of every backend on the same q, k, v: one table, one figure, one sentence.

    Example: efficient-attn compare --inputs stitched --backend window,my_file.py:my_attention
    """
    from efficient_attn.experiments import compare
    from efficient_attn.experiments.contest import contest
    from efficient_attn.experiments.results import open_folder, run_folder
    from efficient_attn.experiments.workload import Workload
    from efficient_attn.measure.environment import command_line
    from efficient_attn.sweep.amounts import parse_seconds, parse_sizes
    from efficient_attn.sweep.isolate import DEFAULT_ISOLATION, ISOLATIONS
    from efficient_attn.sweep.variants import parse_settings

    if extra:
        raise OptionError(f"Values are joined by commas, as in --backend a,b; {extra[0]!r} stands alone.")
    # What is wrong in the request itself is said before torch is loaded.
    tokens = None if seq_len is None else parse_sizes(seq_len, name="--seq-len")
    if tokens is not None and len(tokens) > 1:
        raise OptionError(f"--seq-len is one length, all at which everything is compared, not {seq_len!r}.")
    timeout_s = parse_seconds(timeout, name="--timeout")
    settings = parse_settings(set_ or [])
    isolate = isolate or DEFAULT_ISOLATION
    if isolate not in ISOLATIONS:
        raise OptionError(f"--isolate is {', '.join(ISOLATIONS)}, not {isolate!r}.")
    if json_to not in (None, "-"):
        raise OptionError(f"--json takes - for stdout, not {json_to!r}; files are written to --out.")
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
    _print(results, as_json=json_to is not None)
    typer.echo(str(folder), err=json_to is not None)
    raise typer.Exit(_exit_code(results, named))


def _print(results: Any, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_document(results), indent=2, allow_nan=False, ensure_ascii=False))
        return
    talk.print_tables(results.tables())
    for sentence in results.sentences():
        typer.echo(sentence)
    for note in results.notes:
        talk.say(note)


def _document(results: Any) -> dict[str, Any]:
    from efficient_attn.sweep.records import line

    return {
        "environment": results.environment,
        "records": [json.loads(line(record)) for record in results.records],
        "sentences": results.sentences(),
        "notes": list(results.notes),
        "interrupted": results.interrupted,
    }


def _exit_code(results: Any, named: Sequence[str] | None) -> int:
    """How it went. In a default selection refusals and skips are expected, other failures are not."""
    from efficient_attn.analysis.curves import YARDSTICK
    from efficient_attn.sweep.sizes import YARDSTICKS

    if results.interrupted:
        return exits.INTERRUPTED
    # Yardsticks are measured whether they were asked for or not.
    beside = YARDSTICKS if named is None or YARDSTICK in named else (*YARDSTICKS, YARDSTICK)
    asked = [record for record in results.records if record.case.backend not in beside]
    failed = [record for record in asked if record.status != "ok"]
    if len(failed) == len(asked):
        return exits.NOTHING_MEASURED
    unexpected = [record for record in failed if named or record.status not in ("unsupported", "skipped")]
    return exits.SOME_NOT_MEASURED if unexpected else exits.DONE
