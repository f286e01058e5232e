"""`efficient-attn swap`: a real model with other attention, beside itself."""

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from efficient_attn.errors import OptionError

from . import exits, talk
from .options import (
    BackendOption,
    JsonToOption,
    OutOption,
    RoundsOption,
    SeedOption,
    SetOption,
    ThreadsOption,
    names,
)
from .texts import ModelArgument, NameOption, read_text

TextsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--text", metavar="FILE", help="UTF-8 text, several by repeating it; six shipped ones if left out."
    ),
]
TokensOption = Annotated[
    int | None,
    typer.Option("--tokens", min=2, help="Tokens of each text; 512, or what model and texts have."),
]
SeedsOption = Annotated[int, typer.Option("--seeds", min=1, help="Draws of random features.")]
BySwapOption = Annotated[str | None, typer.Option("--by", metavar="layer", help="Swap each layer alone too.")]
ModelDtypeOption = Annotated[str, typer.Option("--dtype", help="What the model computes in.")]
ModelDeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:1, or auto.")]


def swap_command(
    model: ModelArgument,
    backend: BackendOption = None,
    set_: SetOption = None,
    text: TextsOption = None,
    tokens: TokensOption = None,
    seeds: SeedsOption = 3,
    by: BySwapOption = None,
    name: NameOption = None,
    dtype: ModelDtypeOption = "float32",
    device: ModelDeviceOption = "cpu",
    threads: ThreadsOption = None,
    rounds: RoundsOption = 4,
    seed: SeedOption = 0,
    out: OutOption = None,
    json_to: JsonToOption = None,
) -> None:
    """Swap the attention of a real model and compare it with itself: outputs, time and memory.

    Example: efficient-attn swap MODEL --backend window,linformer --set window.window=65,129 --by layer
    """
    from efficient_attn.experiments import swap
    from efficient_attn.experiments.exchange import exchange
    from efficient_attn.experiments.files import open_folder, run_folder
    from efficient_attn.experiments.workload import Workload
    from efficient_attn.measure.environment import command_line
    from efficient_attn.sweep.variants import parse_settings

    # What is wrong in the request itself is said before torch is loaded.
    if by not in (None, "layer"):
        raise OptionError(f"--by is layer, not {by!r}.")
    if json_to not in (None, "-"):
        raise OptionError(f"--json takes - for stdout, not {json_to!r}; files are written to --out.")
    named = names(backend)
    asked = exchange(
        model,
        named,
        texts=_texts(text),
        tokenizer=None,
        tokens=tokens,
        options=parse_settings(set_ or []),
        seeds=seeds,
        by_layer=by is not None,
        name=name,
        workload=Workload(dtype=dtype, device=device, threads=threads, seed=seed),
    )
    folder = open_folder(out or run_folder("swap"), name="--out", fresh=True)
    # What a backend prints is talk: stdout holds results and nothing else.
    with talk.progress(swap.points(asked)) as show, redirect_stdout(sys.stderr):
        results = swap.run_swap(asked, rounds=rounds, out=folder, command=command_line(), progress=show)
    _print(results, as_json=json_to is not None)
    talk.put(folder, err=json_to is not None)
    raise typer.Exit(_exit_code(results, named))


def _texts(files: Sequence[Path] | None) -> dict[str, str] | None:
    if not files:
        return None
    doubled = {path.name for path in files if [other.name for other in files].count(path.name) > 1}
    if doubled:
        raise OptionError(f"--text: two files are called {min(doubled)!r}; give them names of their own.")
    return {path.name: read_text(path) for path in files}


def _print(results: Any, *, as_json: bool) -> None:
    if as_json:
        talk.put_json(_document(results))
        return
    talk.print_tables(results.tables())
    for sentence in results.sentences():
        talk.put(sentence)
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
    from efficient_attn.analysis.curves import YARDSTICK
    from efficient_attn.sweep.sizes import MEAN_OF_VALUES, OWN

    if results.interrupted:
        return exits.INTERRUPTED
    beside = {OWN, MEAN_OF_VALUES} | (set() if named is None or YARDSTICK in named else {YARDSTICK})
    asked = [record for record in results.records if record.case.backend not in beside]
    failed = [record for record in asked if record.status != "ok"]
    if asked and len(failed) == len(asked):
        return exits.NOTHING_MEASURED
    unexpected = [record for record in failed if named or record.status != "unsupported"]
    return exits.SOME_NOT_MEASURED if unexpected else exits.DONE
