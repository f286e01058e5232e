"""`efficient-attn recall`: one block per backend, trained to look things up."""

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
    CausalOption,
    ExtraArguments,
    ForceResumeOption,
    HeadDimOption,
    JsonToOption,
    OutOption,
    ResumeOption,
    SetOption,
    ThreadsOption,
    names,
)
from .plan import PlanOption, as_plan

PairsOption = Annotated[int, typer.Option("--pairs", help="Tokens of a key and a value.")]
ClassesOption = Annotated[
    int, typer.Option("--classes", help="Different values, of which each comes equally often.")
]
QueriesOption = Annotated[int, typer.Option("--queries", help="Keys of which the value is asked for.")]
GapOption = Annotated[int, typer.Option("--gap", help="Empty tokens between the pairs and the queries.")]
StepsOption = Annotated[int, typer.Option("--steps", help="Batches that each block is trained on.")]
SeedsOption = Annotated[
    int, typer.Option("--seeds", help="Of weights, sequences and random features; each is a training.")
]
SizesOption = Annotated[
    str,
    typer.Option(
        "--num-features",
        metavar="SIZES",
        help="The size of every backend (features, rank or window): 32,64 or 32:256:x2 or 1k.",
    ),
]
TrainedBatchOption = Annotated[int, typer.Option("--batch", help="Sequences of a step.")]
TrainedHeadsOption = Annotated[int, typer.Option("--num-heads", help="Heads of the block.")]
RateOption = Annotated[float, typer.Option("--rate", help="The highest learning rate.")]
FirstSeedOption = Annotated[int, typer.Option("--seed", min=0, help="The first of the seeds.")]


def recall_command(
    context: typer.Context,
    plan: PlanOption = None,
    extra: ExtraArguments = None,
    pairs: PairsOption = 64,
    steps: StepsOption = 300,
    seeds: SeedsOption = 3,
    num_features: SizesOption = "32,64,128",
    causal: CausalOption = False,
    backend: BackendOption = None,
    set_: SetOption = None,
    classes: ClassesOption = 16,
    queries: QueriesOption = 16,
    gap: GapOption = 16,
    batch: TrainedBatchOption = 4,
    num_heads: TrainedHeadsOption = 2,
    head_dim: HeadDimOption = 16,
    rate: RateOption = 0.01,
    threads: ThreadsOption = None,
    seed: FirstSeedOption = 0,
    out: OutOption = None,
    resume: ResumeOption = False,
    force_resume: ForceResumeOption = False,
    json_to: JsonToOption = None,
) -> None:
    """Train one block per backend on associative recall: what training makes of each, beside exact attention.

    Example: efficient-attn recall --causal --backend window,my_file.py:my_attention
    """
    from efficient_attn.experiments.recall import run_recall
    from efficient_attn.experiments.recall_plan import plan_recall
    from efficient_attn.experiments.recall_task import Course, Task
    from efficient_attn.experiments.results import open_folder, run_folder
    from efficient_attn.measure.environment import command_line
    from efficient_attn.sweep.amounts import parse_sizes
    from efficient_attn.sweep.variants import parse_settings

    if extra:
        raise OptionError(
            f"Values are joined by commas, as in --num-features 32,64; {extra[0]!r} stands alone."
        )
    # What is wrong in the request itself is said before torch is loaded.
    resume = resume or force_resume
    if resume and out is None:
        raise OptionError("--resume needs --out, the folder of the run to go on with.")
    if json_to not in (None, "-"):
        raise OptionError(f"--json takes - for stdout, not {json_to!r}; files are written to --out.")
    task = Task(pairs=pairs, classes=classes, queries=queries, gap=gap)
    course = Course(task=task, steps=steps, batch=batch, rate=rate)
    named = names(backend)
    asked = plan_recall(
        named,
        course,
        seeds=seeds,
        sizes=parse_sizes(num_features, name="--num-features"),
        options=parse_settings(set_ or []),
        causal=causal,
        num_heads=num_heads,
        head_dim=head_dim,
        threads=threads,
        seed=seed,
    )
    folder = open_folder(out or run_folder("recall"), name="--out", fresh=not resume)
    # What a backend prints is talk: stdout holds results and nothing else.
    with talk.progress(len(asked.entries)) as show, redirect_stdout(sys.stderr):
        results = run_recall(
            asked,
            out=folder,
            command=command_line(),
            plan=as_plan(context, {"threads": asked.entries[0].case.threads}),
            progress=show,
            resume=resume,
            force_resume=force_resume,
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
    """How it went. In a default selection refusals are expected, other failures are not."""
    from efficient_attn.analysis.recall import contests

    if results.interrupted:
        return exits.INTERRUPTED
    beside = {row.label for one in contests(results.records) for row in one.controls}
    asked = [record for record in results.records if record.case.label not in beside]
    failed = [record for record in asked if record.status != "ok"]
    if len(failed) == len(asked):
        return exits.NOTHING_MEASURED
    unexpected = [record for record in failed if named or record.status != "unsupported"]
    return exits.SOME_NOT_MEASURED if unexpected else exits.DONE
