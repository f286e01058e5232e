"""The quickest run of every study by its command, and what it ends with."""

import contextlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from efficient_attn.measure.records import read
from efficient_attn.studies import find
from efficient_attn.studies.study import Study
from efficient_attn_cli.main import main


@dataclass(frozen=True)
class Quick:
    """The quickest run of a study that has two points or more.

    Attributes:
        words: Options of the run, without its selection of backends.
        selection: Options that select backends, left out where a test selects others.
        codes: Exit code of the run by its backends; own.py holds `broken` and `mean`.
        prepare: Function that writes the files that the run reads into its folder.
        needs: Package without which the run is skipped.
    """

    words: str
    selection: str = "--backend window"
    codes: Mapping[str, int] = field(default_factory=lambda: {"exact,own.py:broken": 3, "own.py:broken": 4})
    prepare: Callable[[Path], object] | None = None
    needs: str = "torch"


def tiny_model(folder: Path) -> None:
    from integrations.hf_models import bert, saved, texts

    saved(bert(), folder / "tiny")
    for name, text in zip(("text.txt", "second.txt"), texts().values(), strict=False):
        (folder / name).write_text(text)


# A study that is added gets a row here; all promises below hold for it.
QUICK = {
    "advise": Quick(
        "tiny --text text.txt --text second.txt --seq-len 16 --rounds 1 --min-cosine 1",
        prepare=tiny_model,
        needs="transformers",
    ),
    "bench": Quick("--seq-len 16 --num-heads 2 --head-dim 8 --rounds 1"),
    "mse": Quick("--inputs gaussian --seq-len 24 --head-dim 4 --size 4,8 --norm 0.5 --draws 2"),
    "recall": Quick(
        "--pairs 4 --classes 2 --queries 2 --gap 4 --steps 1 --seeds 1 --size 4 --head-dim 4",
        selection="--backend window --set window.window=3",
        # The control, a window, is measured with every backend.
        codes={"own.py:broken": 3, "own.py:mean": 0},
    ),
    "swap": Quick(
        "tiny --text text.txt --draws 1 --rounds 1",
        prepare=tiny_model,
        needs="transformers",
    ),
}


OWN = """
def mean(q, k, v):
    return v.mean(dim=-2, keepdim=True).expand_as(v)


def broken(q, k, v):
    raise RuntimeError("it broke here")
"""


def command(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(list(words))
    assert isinstance(ended.value.code, int)
    return ended.value.code, out.getvalue(), err.getvalue()


def words_of(name: str) -> list[str]:
    """The command line of the quickest run, without its selection, in as many threads as the tests."""
    threads = ["--threads", "1"] if "--threads" in flags(name) else []
    return [name, *QUICK[name].words.split(), *threads]


def study_of(name: str) -> Study:
    return find(name)


def flags(name: str) -> list[str]:
    return [one.flag for one in study_of(name).parameters()]


def run(name: str, *more: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the quickest run with more options."""
    selection = [] if "--backend" in more else QUICK[name].selection.split()
    return command(*words_of(name), *selection, *more)


def cases(folder: str) -> set[str]:
    return {record.case.key for record in read(Path(folder, "records.jsonl")).records}
