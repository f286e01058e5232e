"""Options that several commands share, each declared once."""

from pathlib import Path
from typing import Annotated

import typer

from efficient_attn.errors import OptionError
from efficient_attn.limits import WHOLE_NUMBER
from efficient_attn.studies.options import RUNS_CODE, complete_backends

BackendOption = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="NAME[,NAME…]",
        help=f"Backends, by name or as path/file.py:function; all near softmax if left out. {RUNS_CODE}",
        autocompletion=complete_backends,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="BACKEND.OPTION=VALUE[,VALUE…]",
        help="An option of a backend; several values make several variants.",
    ),
]
SeqLenOption = Annotated[
    str, typer.Option("--seq-len", metavar="LENGTHS", help="Tokens: 256,512 or 256:4096:x2 or 1k.")
]
OfOption = Annotated[
    str,
    typer.Option(
        "--of", metavar="attention|block|encoder", help="Alone, in a block, in a stack; several: a,b."
    ),
]
LayersOption = Annotated[int | None, typer.Option("--layers", min=1, help="Blocks of an encoder; 3.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.")]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="auto (float32 on the CPU, bfloat16 on CUDA) or a dtype's name.")
]
CausalOption = Annotated[
    bool,
    typer.Option(
        "--causal/--no-causal", help="Causal masking: each token attends to itself and earlier tokens."
    ),
]
BackwardOption = Annotated[
    bool, typer.Option("--backward/--no-backward", help="Forward and backward pass together.")
]
NumHeadsOption = Annotated[
    str, typer.Option("--num-heads", metavar="N[,N…]", help="Heads; several are measured side by side.")
]
ModelDimOption = Annotated[
    int | None,
    typer.Option("--model-dim", min=1, help="Entries of all heads together, in the place of --head-dim."),
]
BenchHeadDimOption = Annotated[
    int | None, typer.Option("--head-dim", min=1, help="Entries of one query or key; 64.")
]
HeadDimOption = Annotated[int, typer.Option("--head-dim", min=1, help="Entries of one query or key.")]
BatchOption = Annotated[int, typer.Option("--batch", min=1, help="Sequences at once.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads; torch's default if omitted.")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=WHOLE_NUMBER, help="Random seed.")]
BudgetOption = Annotated[
    str,
    typer.Option(
        "--budget",
        metavar="TIME",
        help="Measure for so long and skip what would take longer; drawing comes after it: 90s, 2m, 1h.",
    ),
]
RunBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="TIME",
        help="Time for measuring, such as 90s, 2m or 1h; points that do not fit are skipped.",
    ),
]
QuietOption = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="Print the folder of the results alone: no progress, tables or notes."
    ),
]
MemoryLimitOption = Annotated[
    str, typer.Option("--memory-limit", metavar="AMOUNT", help="Skip what would need more: 70% or 8GiB.")
]
IsolateOption = Annotated[
    str | None,
    typer.Option(
        "--isolate",
        metavar="none|reuse|point",
        help="Measure in this process, in one that is replaced after a failure, or in a new one each time.",
    ),
]
TimeoutOption = Annotated[
    str, typer.Option("--timeout", metavar="TIME", help="End what takes longer, unless --isolate none.")
]
RoundsOption = Annotated[
    int, typer.Option("--rounds", min=1, help="How often each time is taken up; more makes it more certain.")
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="New folder for the results; runs/NAME-TIME if omitted."),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Continue the run in --out; measured points are kept.")
]
ForceResumeOption = Annotated[
    bool,
    typer.Option("--force-resume", help="Continue it also under another torch, thread count or processor."),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="List the points of the run without measuring any.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
JsonToOption = Annotated[
    str | None, typer.Option("--json", metavar="-", help="Print one JSON document to stdout.")
]
# `--seq-len 256 512` would otherwise end in a message that names nothing.
ExtraArguments = Annotated[list[str] | None, typer.Argument(hidden=True)]


def names(texts: list[str] | None) -> list[str] | None:
    """The names in `a,b` and repeated options; None if nothing was given."""
    if not texts:
        return None
    found = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    if not found:
        # An empty variable of a script arrives like this; it does not mean all backends.
        raise OptionError(
            f"{texts[0]!r} names nothing; write a,b for several names, or leave the option out."
        )
    return found


def refuse_extra(extra: list[str] | None, example: str = "--backend a,b") -> None:
    """Refuse a word that belongs to no option."""
    if extra:
        raise OptionError(f"Values are joined by commas, as in {example}; {extra[0]!r} stands alone.")


def as_json(json_to: str | None) -> bool:
    """Whether stdout is one JSON document."""
    if json_to not in (None, "-"):
        raise OptionError(f"--json takes - for stdout, not {json_to!r}; `--json - > FILE` makes it a file.")
    return json_to is not None


def isolation(isolate: str | None) -> str:
    """Isolation of the measurements; the default if none was given."""
    from efficient_attn.runner.isolation import DEFAULT_ISOLATION, ISOLATIONS

    if isolate not in (None, *ISOLATIONS):
        raise OptionError(f"--isolate is {', '.join(ISOLATIONS)}, not {isolate!r}.")
    return isolate or DEFAULT_ISOLATION
