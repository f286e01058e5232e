"""`efficient-attn recall`: one block per backend, trained to look things up."""

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from efficient_attn.errors import OptionError
from efficient_attn.limits import WHOLE_NUMBER

from . import talk
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
    as_json,
    names,
    refuse_extra,
)
from .outcome import finish
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
FirstSeedOption = Annotated[
    int, typer.Option("--seed", min=0, max=WHOLE_NUMBER, help="The first of the seeds.")
]


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
    from efficient_attn.experiments.files import open_folder, run_folder
    from efficient_attn.experiments.recall import run_recall
    from efficient_attn.experiments.recall_plan import plan_recall
    from efficient_attn.experiments.recall_task import Course, Task
    from efficient_attn.measure.environment import command_line
    from efficient_attn.sweep.amounts import parse_sizes
    from efficient_attn.sweep.variants import parse_settings

    refuse_extra(extra)
    # What is wrong in the request itself is said before torch is loaded.
    resume = resume or force_resume
    if resume and out is None:
        raise OptionError("--resume needs --out, the folder of the run to go on with.")
    to_stdout = as_json(json_to)
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
    finish(results, named, folder=folder, as_json=to_stdout)
