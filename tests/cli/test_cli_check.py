"""`efficient-attn check`: answers, tables, JSON and exit codes."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from command_line import command

import efficient_attn as ea
from efficient_attn.conformance.cases import DTYPES
from efficient_attn.conformance.certified import certified_digits
from efficient_attn.conformance.subject import subject
from efficient_attn.testing import adapt

ATTEND = """
def attend(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v

def rolled(q, k, v):
    return attend(q, k, v.roll((1, 1), dims=(0, 1)) if q.shape[2] > 2000 else v)

def endless(q, k, v):
    while q.requires_grad:
        pass
    return attend(q, k, v)

def endlessly(q, k, v):
    while True:
        pass

def segfaults(q, k, v):
    import ctypes
    return ctypes.string_at(0) if q.requires_grad else attend(q, k, v)
"""


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    """A folder with the functions."""
    (tmp_path / "mine.py").write_text(ATTEND)
    monkeypatch.chdir(tmp_path)


def check(name, *words):
    """Exit code and standard output for a function of the file."""
    return command("check", f"mine.py:{name}", *words)[:2]


@pytest.fixture
def in_this_process(monkeypatch):
    """Without child processes, which take seconds to start."""

    def check_here(backend, *, only, declared, **settings):
        tested = adapt(backend, **declared) if declared else backend
        return ea.check(tested, only=only, on_fail="collect")

    monkeypatch.setattr("efficient_attn.isolated_testing.check_isolated", check_here)


def test_a_function_in_a_file_is_checked_in_a_table_that_tells_what_could_not_be(in_this_process):
    words = ("--only", "padding_contents_change_no_bit,equals_softmax_attention,frozen_inputs")
    code, out = check("attend", *words, "--all")
    assert code == 0, out
    assert "padding_contents_change_no_bit: skipped, undeclared." in out and "Not declared: key mask." in out
    assert "equals softmax attention " in out and "passes, undeclared" in out
    undeclared = "Tests of undeclared capabilities: 1 passed, 1 skipped; see --all."
    compared = "Not compared with softmax attention: --exact declares it."
    brief = ["mine.py:attend: 1 of 1 tests passed.", compared, undeclared]
    assert check("attend", *words)[1].splitlines() == brief == out.splitlines()[:3]


@pytest.mark.parametrize(
    ("name", "words", "first", "part"),
    [
        ("local_window", (), "[0-9]+ of [0-9]+ tests passed", "Position-dependent .*: order of keys not t"),
        ("strided", (), "[0-9]+ of [0-9]+ tests passed", "97 of 130 keys have no gradient"),
        ("memoising", (), "2[0-9] broken of [0-9]+ tests: no state betw", "- [0-9]+ more: see --all"),
        (
            "wrong_scale",
            ("--exact",),
            "1 broken of [0-9]+ tests: equals softmax attention",
            r"- equals_softmax_attention: Against the definition \(error .*, at most 1e-12\)",
        ),
    ],
)
def test_an_answer_is_one_screen_with_the_verdict_first(name, words, first, part, in_this_process):
    shutil.copy(Path(__file__).parents[1] / "helpers/plain_functions.py", "plain.py")
    code, out, _ = command("check", f"plain.py:{name}", *words)
    lines = out.splitlines()
    assert len(lines) < 24 and max(map(len, lines)) <= 100, out
    assert re.match(f"plain.py:{name}: {first}", lines[0]) and re.search(part, out), out
    assert code == ("broken" in lines[0]) == ("replay(" in out)
    assert f"_tests-{'red' if code else 'brightgreen'})" in out
    page = (Path(__file__).parents[2] / "docs/new-attention.md").read_text(encoding="utf-8")
    assert re.sub("Bits of .*\n", "", out) in page or name != "local_window"


@pytest.fixture
def digits_in_this_process(monkeypatch):
    def digits_here(backend, *, declared, **settings):
        tested = adapt(backend, **declared) if declared else backend
        return list(certified_digits(subject(tested, None, 0)))

    monkeypatch.setattr("efficient_attn.isolated_testing.certified_digits_isolated", digits_here)


def test_certified_prints_digits_and_required_digits_per_case_and_dtype(digits_in_this_process):
    code, out = check("attend", "--certified")
    lines = out.splitlines()
    assert code == 0 and max(map(len, lines)) <= 100
    # Digits near the requirement differ between processors.
    assert re.fullmatch(r"mine.py:attend: (1\d\d) of \1 required digits on 13 certified cases\.", lines[0])
    assert re.fullmatch(r"Fewest digits of the output: 1[1-5]\.\d float64, .* –: none required\.", lines[1])
    assert re.search(r"^Correct digits of gradients / required$", out, re.MULTILINE)
    assert len(re.findall(r"^ norm-20 +1[23]\.\d / \d+\.\d ", out, re.MULTILINE)) == 2, out
    assert check("attend", "--certified", "--causal")[1].splitlines()[0] != lines[0]


def test_certified_names_missing_digits_and_exits_with_code_1(digits_in_this_process):
    shutil.copy(Path(__file__).parents[1] / "helpers/plain_functions.py", "plain.py")
    code, out, _ = command("check", "plain.py:wrong_scale", "--certified")
    assert code == 1 and re.search(r"^- \S+, float64, output: \d\.\d / 13\.\d below$", out, re.MULTILINE), out
    code, out, _ = command("check", "plain.py:wrong_scale", "--certified", "--json")
    records = json.loads(out)
    assert code == 1 and {record["dtype"] for record in records} == {*DTYPES}
    assert not all(record["holds"] for record in records)


def test_certified_counts_an_error_as_a_missing_digit_and_nan_as_none(digits_in_this_process):
    Path("broken.py").write_text(
        "def refuses(q, k, v, causal=False):\n    if causal:\n        raise ValueError('not causal')\n"
        "    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1) @ v\n\n\n"
        "def nan(q, k, v):\n    return v * float('nan')\n"
    )
    code, out, _ = command("check", "broken.py:refuses", "--certified", "--causal")
    kept, required = map(int, re.match(r"\S+ (\d+) of (\d+) required", out).groups())
    assert code == 1 and kept < required and "ValueError: not causal" in out
    code, out, _ = command("check", "broken.py:nan", "--certified")
    assert code == 1 and "Fewest digits of the output: none float64" in out and "-99" not in out


@pytest.mark.slow
def test_certified_runs_in_a_child_process(tmp_path):
    code, out = check("attend", "--certified", "--json")
    assert code == 0 and len(json.loads(out)) == 208
    code, out, err = command("check", "nystrom", "--certified")
    assert (code, out) == (2, "") and "Backend 'nystrom' has no certified values." in err
    code, out, err = command("check", "mine.py:segfaults", "--certified")
    assert (code, out) == (2, "") and "mine.py:segfaults has no digits: the process crashed" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "timeout", "detail"),
    [
        ("endless", "30s", "took longer than 30 s (raise it with --timeout)."),
        ("segfaults", "5m", "crashed with signal 11 (SIGSEGV)."),
    ],
)
def test_a_check_that_hangs_or_crashes_is_a_row_and_the_next_one_is_made(name, timeout, detail):
    tried = ["gradients_are_those_of_finite_differences", "order_of_keys_does_not_matter"]
    code, out = check(name, "--only", ",".join(tried), "--timeout", timeout, "--json")
    records = json.loads(out)
    assert code == 1 and [record["check"] for record in records] == tried
    assert [record["outcome"] for record in records] == ["broken", "kept"]
    assert records[0]["detail"] == f"The check did not end: the process {detail}" and records[0]["failed"]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "outcome"), [((), "kept"), (("--long",), "broken")])
def test_long_adds_sequences_that_the_short_form_does_not_reach(words, outcome):
    alone = "every_sequence_is_its_single_call,every_head_is_its_single_call"
    _, out = check("rolled", "--only", alone, "--json", *words)
    assert [record["outcome"] for record in json.loads(out)] == [outcome] * 2


@pytest.mark.slow
def test_after_three_checks_that_hang_the_others_are_not_tried():
    code, out = check("endlessly", "--timeout", "5s", "--all")
    # Of the checks that run beside one another each may be the third.
    assert code == 1 and 3 <= int(re.search("([0-9]+) broken of", out)[1]) <= 6, out
    assert re.search("Not tried: [3-6] earlier checks did not end", out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("exact", "--only", "nonesuch"), "No check is called 'nonesuch'."),
        ((), "Missing argument 'BACKEND'"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(words, message):
    code, out, err = command("check", *words)
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1


FILES = {
    "hangs": ("while True: pass", "took longer than 5 s"),
    "crashes": ("import ctypes\nctypes.string_at(0)", "the process crashed with signal 11 (SIGSEGV)"),
    "exits": ("import os\nos._exit(7)", "the process ended with exit code 7"),
    "leaves": ("import sys\nsys.exit()", "leaves.py cannot be imported: SystemExit (leaves.py, line 2)."),
}


@pytest.mark.skipif(os.name != "posix", reason="isolation needs process groups")
@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_an_import_that_does_not_end_well_is_a_line_that_names_the_file(name, tmp_path):
    text, ending = FILES[name]
    (tmp_path / f"{name}.py").write_text(f"{text}\n")
    code, out, err = command("check", f"{name}.py:attend", "--timeout", "5s")
    assert (code, out) == (2, ""), err
    line = err.splitlines()[-1]
    assert line.startswith(f"error: {name}.py cannot be ") and ending in line
