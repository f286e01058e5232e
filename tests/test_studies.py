"""A study is one file: nothing else is edited to add one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from made_records import forgotten

import efficient_attn as ea
from efficient_attn import studies
from efficient_attn.studies.engine import function_of

FILE = '''
"""Sums of numbers, as fast as this process adds them."""

from functools import partial
from typing import Annotated

from efficient_attn.measure.quantities import Quantity
from efficient_attn.measure.record import Case, Record
from efficient_attn.studies import options as shared
from efficient_attn.studies.study import Option, Plan, Point, Study, in_lists


def plan(
    *,
    seq_len: shared.SeqLens = (4, 8),
    first: Annotated[int, Option(help="Smallest number.", least=0)] = 0,
) -> Plan:
    """Sum the first whole numbers.

    Example: efficient-attn sums --seq-len 4,8
    """
    cases = [
        Case(kind="sum", backend="exact", label="exact", num_heads=1, head_dim=1, tokens=n, dtype="float32",
             device="cpu", threads=1)
        for n in seq_len
    ]
    points = [Point(case=case, measure=partial(_sum, case, first), cost=case.tokens) for case in cases]
    return Plan(steps=partial(in_lists, [points]))


def _sum(case, first):
    return Record(case=case, sum=sum(range(first, case.tokens)))


def tables(records, environment):
    from efficient_attn.report.table import Table

    rows = tuple((str(record.case.tokens), str(record.sum)) for record in records)
    return [Table("Sums", ("tokens", "sum"), rows)]


def plots(records, environment):
    from efficient_attn.report.figures import Axis, Chart, Plot, Series

    tokens, sums = zip(*((record.case.tokens, record.sum) for record in records))
    line = Series("exact", tokens, sums, {"marker": "o"})
    return {"sum": Plot("Sums", "on one processor", ((Chart(Axis("tokens"), Axis("sum"), (line,)),),))}


SUM = Quantity(name="sum", unit="", meaning="Sum of whole numbers.", type="whole number", better="more")
STUDY = Study(name="sums", plan=plan, module=__name__, kinds=("sum",), quantities=(SUM,))
'''


@pytest.fixture
def sums(tmp_path, monkeypatch):
    """A folder of studies besides ours, as another process finds it too."""
    home = tmp_path / "more"
    home.mkdir()
    (home / "sums.py").write_text(FILE)
    monkeypatch.setattr(studies, "__path__", [*studies.__path__, str(home)])
    studies.studies.cache_clear()
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    with forgotten():
        yield home
    studies.studies.cache_clear()
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
    Path("two/records.jsonl").write_text(Path("one/records.jsonl").read_text().replace(": 28", ": 26"))
    codes, out, _ = finished(sums, "diff one one --fail-on sum:5%", "diff one two --fail-on sum:5%")
    assert codes == [0, 1] and "sum " in out


def test_a_file_is_a_python_function_with_its_options(sums):
    results = function_of(studies.find("sums"))(seq_len=(4, 8), first=3)
    assert [record.sum for record in results.records] == [3, 25]
    assert [table.title for table in results.tables()] == ["Sums"]


@pytest.mark.parametrize("name", sorted(studies.studies()))
def test_every_study_declares_each_option_once_and_has_the_options_of_every_run(name):
    study = studies.find(name)
    flags = [one.flag for one in study.parameters()]
    assert len(set(flags)) == len(flags) and all(one.option.help.endswith(".") for one in study.parameters())
    shown = getattr(ea, name).__doc__
    assert all(f"    {one.name}: " in shown for one in study.parameters()) and "    resume: " in shown
