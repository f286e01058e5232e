"""The smallest input that breaks a promise: found, kept in the record, and repeated by the lines printed."""

from pathlib import Path

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

import efficient_attn as ea
from efficient_attn.conformance.cases import CheckCase
from efficient_attn.conformance.table import snippet
from efficient_attn.errors import UnknownNameError
from efficient_attn.testing import adapt, replay
from efficient_attn_cli.main import main

# Right up to four tokens and one head; of more, outputs are a thousandth too large.
LATE = """
def late(q, k, v):
    out = ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(dim=-1) @ v
    return out * (1.001 if q.shape[-2] > 4 and q.shape[1] > 1 else 1.0)


def refusing(q, k, v):
    if q.shape[-2] > 2:
        raise ValueError("no more than two")
    return late(q, k, v)
"""
EXACT = {"exact": True}
CHECK = "equals_softmax_attention"


@pytest.fixture
def late(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("late.py").write_text(LATE, encoding="utf-8")
    return "late.py:late"


def broken(target, **settings):
    (record,) = ea.check(adapt(target, **EXACT), only=[CHECK], on_fail="collect", **settings)
    return record


def test_the_case_of_a_broken_promise_is_the_smallest_that_breaks_it(late):
    record = broken(late)
    case = CheckCase(**record.case)
    assert (case.tokens, case.heads, case.batch, case.head_dim, case.value_dim) == (5, 2, 1, 1, 1)
    assert record.outcome == "broken" and record.error > record.bound
    assert "q [1, 2, 5, 1]" in record.detail


def test_a_broken_promise_of_causality_has_a_causal_counterexample():
    def noncausal(q, k, v, causal=False):
        return (q @ k.mT).softmax(dim=-1) @ v

    promise = "later_values_move_no_output"
    (record,) = ea.check(adapt(noncausal, causal=True), only=[promise], on_fail="collect")
    case = CheckCase(**record.case)
    assert case.causal and case.tokens == 2 and record.outcome == "broken"


def test_a_replayed_counterexample_is_broken_again(late):
    record = broken(late, seed=3)
    inputs, findings = replay(adapt(late, **EXACT), record.check, record.case, seed=3)
    assert inputs.q.shape == (1, 2, 5, 1)
    assert next(finding.error for finding in findings if not finding.holds) == record.error
    inputs, findings = replay("exact", record.check, record.case)
    assert findings and all(finding.holds for finding in findings)
    with pytest.raises(UnknownNameError, match="check"):
        replay("exact", "equals_softmax", record.case)


def test_a_kept_promise_has_no_counterexample_and_an_error_has_its_input(late):
    (kept,) = ea.check("exact", only=["order_of_keys_does_not_matter"])
    assert kept.case is None
    raised = broken("late.py:refusing")
    assert raised.case["tokens"] > 2 and "no more than two" in raised.detail
    with pytest.raises(ValueError, match="no more than two"):
        replay(adapt("late.py:refusing", **EXACT), CHECK, raised.case)


def test_the_lines_of_python_run_as_they_are(late, capsys):
    record = broken(late)
    exec(snippet(record, late, EXACT, 0))
    printed = capsys.readouterr().out
    assert printed.count("tensor(") == 3 and f"error={record.error}" in printed
    assert "seed=4" in snippet(record, late, None, 4) and "adapt" not in snippet(record, late, None, 4)


@pytest.mark.slow
def test_the_command_prints_the_smallest_counterexample(late, capfd):
    only = ("--only", f"{CHECK},every_head_is_its_single_call")
    with pytest.raises(SystemExit, match="1"):
        main(["check", late, "--signature", "plain", "--exact", *only])
    out = capfd.readouterr().out
    begin = out.index("from efficient_attn.testing")
    exec(out[begin : out.index("sep=", begin) + len('sep="\\n")')])
    assert "tensor(" in capfd.readouterr().out
