"""A study is one file: nothing else is edited to add one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from synthetic_records import forgotten

import efficient_attn as ea
from efficient_attn import studies
from efficient_attn.runs import registry
from efficient_attn.runs.run import python_function
from efficient_attn.runs.study import Study

FILE = '''
"""Sums of numbers, as fast as this process adds them."""

from dataclasses import KW_ONLY, dataclass
from functools import partial

from efficient_attn.measure.quantities import cost
from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.units import parse_sizes
from efficient_attn.options import option
from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.table import Table
from efficient_attn.runs import shared_options as shared
from efficient_attn.runs.study import Point, Study

SHAPE = {"num_heads": 1, "head_dim": 1, "dtype": "float32", "device": "cpu", "threads": 1}


class Sum(Record):
    sum: int | None = cost("", "Sum of whole numbers.")


@dataclass(frozen=True, eq=False)
class Sums(Study):
    """Sum the first whole numbers.

    Example: efficient-attn sums --seq-len 4,8
    """

    kinds = ("sum",)
    record = Sum

    _: KW_ONLY
    seq_lens: shared.Sizes = shared.seq_lens((4, 8))
    first: int = option(0, "Smallest number.", least=0)

    def points(self):
        for tokens in parse_sizes(self.seq_lens, name="seq_lens"):
            case = Case(kind="sum", backend="exact", label="exact", tokens=tokens, **SHAPE)
            yield Point(case=case, measure=partial(_sum, case, self.first), cost=tokens)

    def tables(self, records, run):
        rows = tuple((str(record.case.tokens), str(record.sum)) for record in records)
        return [Table("Sums", ("tokens", "sum"), rows)]

    def plots(self, records, run):
        tokens, sums = zip(*((record.case.tokens, record.sum) for record in records))
        line = Series("exact", tokens, sums, {"marker": "o"})
        return {"sum": Plot("Sums", "on one processor", ((Chart(Axis("tokens"), Axis("sum"), (line,)),),))}


def _sum(case, first):
    return Sum(case=case, sum=sum(range(first, case.tokens)))
'''


@pytest.fixture
def sums(tmp_path, monkeypatch):
    """A folder of studies besides ours, as another process finds it too."""
    home = tmp_path / "more"
    home.mkdir()
    (home / "sums.py").write_text(FILE)
    monkeypatch.setattr(studies, "__path__", [*studies.__path__, str(home)])
    registry.studies.cache_clear()
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    with forgotten():
        yield home
    registry.studies.cache_clear()
    for name in [name for name in sys.modules if name.startswith("efficient_attn.studies.sums")]:
        del sys.modules[name]


RUN = """
import json, sys
import efficient_attn.studies as studies

studies.__path__.append(sys.argv[1])
from efficient_attn_cli.main import main

codes = []
for words in json.loads(sys.argv[2]):
    try:
        main(words)
    except SystemExit as ended:
        codes.append(ended.code)
print(json.dumps(codes), file=sys.stderr)
"""


def finished(home, *commands):
    """Exit codes, stdout and stderr of commands in a process that has the folder too."""
    words = [sys.executable, "-c", RUN, str(home), json.dumps([command.split() for command in commands])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=True)
    err, _, codes = done.stderr.rstrip().rpartition("\n")
    return json.loads(codes), done.stdout, err


@pytest.mark.slow
def test_a_file_is_a_command_with_help_records_table_plot_page_and_diff(sums):
    codes, out, err = finished(sums, "sums --help", "sums --seq-len 4:16:x2 --out one")
    assert codes == [0, 0] and "Sums" in out and "[3/3]" in err
    assert "Sum the first whole numbers." in out and "--seq-len" in out and "--first" in out
    folder = Path("one")
    assert [record.sum for record in ea.read(folder).records] == [6, 28, 120]
    assert json.loads((folder / "environment.json").read_text())["study"] == "sums"
    assert (folder / "sum.png").exists() and "Sums" in (folder / "report.html").read_text()
    shutil.copytree("one", "two")
    Path("two/records.jsonl").write_text(Path("one/records.jsonl").read_text().replace(": 28", ": 30"))
    codes, out, _ = finished(sums, "diff one one --fail-on sum:5%", "diff one two --fail-on sum:5%")
    assert codes == [0, 1] and "sum " in out


def test_a_file_is_a_public_function_with_its_options(sums, monkeypatch):
    # A new process lists the folder anew.
    monkeypatch.setattr(ea, "_STUDIES", [*ea._STUDIES, "sums"])
    monkeypatch.setattr(ea, "__all__", [*ea.__all__, "sums"])
    results = ea.sums(seq_lens=(4, 8), first=3)
    monkeypatch.delattr(ea, "sums")
    assert [record.sum for record in results.records] == [3, 25]
    assert [table.title for table in results.tables()] == ["Sums"]


def test_a_resumed_run_has_the_stored_options_and_refuses_others(sums):
    run = python_function(registry.find("sums"))
    run(seq_lens=(4,), first=3, out="out")
    again = run(seq_lens=(4, 8), out="out", resume=True)
    assert [record.sum for record in again.records] == [3, 25]
    with pytest.raises(ea.DataError, match=r"^out: out has first=3, not 4; name a new folder\.$"):
        run(first=4, out="out", resume=True)


def test_an_object_is_stored_by_its_label_and_has_to_be_passed_again(tmp_path, undrawn, hasty):
    def mean(q, k, v):
        return v.mean(dim=-2, keepdim=True).expand_as(v)

    request = {"seq_lens": 16, "num_heads": 2, "head_dim": 8, "rounds": 1, "error": False, "isolate": "none"}
    results = ea.bench([mean], out=tmp_path, **request)
    assert results.environment["options"]["backends"] == [{"object": "mean"}]
    with pytest.raises(ea.OptionError, match="measured with 'mean', an object; pass it again"):
        ea.bench(out=tmp_path, resume=True)
    assert ea.bench([mean], out=tmp_path, resume=True).records == results.records


def test_a_helper_among_the_studies_is_refused_in_one_line_that_names_its_place(sums):
    (sums / "helper.py").write_text("NUMBER = 3\n")
    registry.studies.cache_clear()
    with pytest.raises(ea.DataError, match=r"studies/helper has 0 subclasses of Study, not one: .*folder"):
        registry.studies()
    (sums / "helper.py").unlink()


@pytest.mark.parametrize("name", sorted(registry.studies()))
def test_every_study_declares_each_option_once_and_has_the_options_of_every_run(name):
    assert registry.find(name).__bases__ == (Study,)
    options = [option for option, _ in registry.find(name).declared()]
    flags = [option.metadata["flag"] or option.name for option in options]
    assert len({*flags}) == len(flags) and all(option.metadata["help"].endswith(".") for option in options)
    shown = getattr(ea, name).__doc__
    assert all(f"    {option.name}: " in shown for option in options) and "    resume: " in shown
