"""`efficient-attn train`: small language models that differ by their attention alone, trained by turns."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from efficient_attn.errors import OptionError
from efficient_attn.limits import WHOLE_NUMBER

from . import talk
from .options import (
    BackendOption,
    DeviceOption,
    ExtraArguments,
    ForceResumeOption,
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

TextOption = Annotated[
    Path | None,
    typer.Option(
        "--text", metavar="FILE", help="Text in UTF-8; the sources of Python's own library if left out."
    ),
]
TrainBudgetOption = Annotated[
    str,
    typer.Option(
        "--budget",
        metavar="TIME",
        help="Train and evaluate for so long, all backends together; drawing comes after it: 90s, 5m, 1h.",
    ),
]
StepsOption = Annotated[
    int | None, typer.Option("--steps", min=1, help="End here at the latest; a multiple of --every.")
]
SizeOption = Annotated[
    int, typer.Option("--size", min=1, help="Features, window or clusters wherever --set says nothing else.")
]
WindowTokensOption = Annotated[
    int, typer.Option("--seq-len", min=1, metavar="N", help="Bytes of one window.")
]
WindowsAtOnceOption = Annotated[int, typer.Option("--batch", min=1, help="Windows of one step.")]
WidthOption = Annotated[int, typer.Option("--model-dim", min=1, help="Entries of all heads together.")]
HeadsOption = Annotated[int, typer.Option("--num-heads", min=1, help="Heads of a block.")]
BlocksOption = Annotated[int, typer.Option("--layers", min=1, help="Blocks of a model.")]
PositionsOption = Annotated[
    str, typer.Option("--positions", metavar="rotary|sinusoidal|learned", help="What tells tokens' places.")
]
RateOption = Annotated[float, typer.Option("--learning-rate", help="Of AdamW, at its peak.")]
WarmupOption = Annotated[int, typer.Option("--warmup", min=1, help="Steps up to the peak.")]
EveryOption = Annotated[
    int, typer.Option("--every", min=1, help="Steps from one evaluation and checkpoint to the next.")
]
WindowsOption = Annotated[int, typer.Option("--windows", min=2, help="Held-out windows of an evaluation.")]
RedrawOption = Annotated[
    int,
    typer.Option("--redraw-every", min=0, help="Draw random features anew after so many steps; 0: never."),
]
TrainSeedOption = Annotated[
    int, typer.Option("--seed", min=0, max=WHOLE_NUMBER, help="Of weights, batches and features.")
]
SampleOption = Annotated[
    int, typer.Option("--sample", min=0, metavar="N", help="Print N bytes that each best model goes on with.")
]


def train_command(
    context: typer.Context,
    plan: PlanOption = None,
    extra: ExtraArguments = None,
    text: TextOption = None,
    backend: BackendOption = None,
    set_: SetOption = None,
    size: SizeOption = 64,
    budget: TrainBudgetOption = "280s",
    steps: StepsOption = None,
    seq_len: WindowTokensOption = 256,
    batch: WindowsAtOnceOption = 8,
    model_dim: WidthOption = 64,
    num_heads: HeadsOption = 4,
    layers: BlocksOption = 2,
    positions: PositionsOption = "rotary",
    learning_rate: RateOption = 0.01,
    warmup: WarmupOption = 20,
    every: EveryOption = 20,
    windows: WindowsOption = 64,
    redraw_every: RedrawOption = 0,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    seed: TrainSeedOption = 0,
    sample: SampleOption = 0,
    out: OutOption = None,
    resume: ResumeOption = False,
    force_resume: ForceResumeOption = False,
    json_to: JsonToOption = None,
) -> None:
    """Train a small byte-level language model around each causal backend, by turns on the same text.

    Example: efficient-attn train --text book.txt --backend window,my_file.py:my_spec --budget 10m
    """
    from efficient_attn.experiments import train
    from efficient_attn.experiments.course import course
    from efficient_attn.experiments.files import run_folder
    from efficient_attn.experiments.turns import Limit
    from efficient_attn.measure.environment import command_line
    from efficient_attn.sweep.amounts import parse_seconds
    from efficient_attn.sweep.variants import parse_settings

    refuse_extra(extra)
    to_stdout = as_json(json_to)
    resume = resume or force_resume
    if resume and out is None:
        raise OptionError("--resume needs --out, the folder of the run to go on with.")
    budget_s = parse_seconds(budget, name="--budget")
    chosen = course(
        tokens=seq_len,
        batch=batch,
        model_dim=model_dim,
        num_heads=num_heads,
        num_layers=layers,
        positions=positions,
        learning_rate=learning_rate,
        warmup=warmup,
        every=every,
        windows=windows,
        redraw_every=redraw_every,
        device=device,
        threads=threads,
        seed=seed,
    )
    limit = Limit.of(budget_s, steps, chosen)
    variants = train.variants(names(backend), size=size, options=parse_settings(set_ or []))
    folder = out or run_folder("train")
    # What a backend prints is talk: stdout holds results and nothing else.
    with _progress() as show, redirect_stdout(sys.stderr):
        results = train.run_training(
            variants,
            chosen,
            limit,
            text=text,
            out=folder,
            resume=resume,
            force_resume=force_resume,
            command=command_line(),
            plan=as_plan(context, {"device": chosen.device, "threads": chosen.threads}),
            progress=show,
        )
    for label, words in train.samples(folder, variants, sample):
        talk.put(f"{label}: {words}", err=to_stdout)
        talk.put("", err=to_stdout)
    finish(results, names(backend), folder=folder, as_json=to_stdout)


@contextmanager
def _progress() -> Iterator[Callable[[Any], None]]:
    """A bar on a terminal; elsewhere a line for every evaluation."""
    with talk.progress(1) as show:

        def tell(step: Any) -> None:
            show(step)
            if not talk.draws():
                talk.say(f"[{step.done}/{step.total}] {step.doing}; {talk.remaining(step)}")

        yield tell
