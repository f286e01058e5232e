"""How a command that measures ends: stdout and stderr, and the exit code."""

import json

import pytest
import typer
from made_records import costs, errors

from efficient_attn.measure.record import replace
from efficient_attn.studies.results import Results
from efficient_attn_cli import exits
from efficient_attn_cli.command import exit_code, finish

REFUSED, SKIPPED, BROKEN = "unsupported", "skipped", "error"


def results(*statuses, labels=("exact", "window", "linformer")):
    """Results in which the last labels have these statuses, and all before them were measured."""
    told = dict(zip(reversed(labels), reversed(statuses), strict=False))
    records = costs(labels, lengths=(256,))
    return Results([_with(record, told.get(record.case.label, "ok")) for record in records], environment={})


def _with(record, status):
    if status == "ok":
        return record
    return replace(record, status=status, reason="because", times_s=None, peak_bytes=None)


@pytest.mark.parametrize(
    ("statuses", "named", "code"),
    [
        ([], None, exits.DONE),
        ([REFUSED], None, exits.DONE),
        ([SKIPPED], None, exits.DONE),
        ([BROKEN], None, exits.SOME_NOT_MEASURED),
        ([REFUSED], ["window", "linformer"], exits.SOME_NOT_MEASURED),
        ([SKIPPED], ["window", "linformer"], exits.SOME_NOT_MEASURED),
        # Exact attention was measured beside them, but nobody asked for it.
        ([REFUSED, BROKEN], ["window", "linformer"], exits.NOTHING_MEASURED),
        ([REFUSED, BROKEN], ["exact", "window", "linformer"], exits.SOME_NOT_MEASURED),
        ([REFUSED, REFUSED, SKIPPED], None, exits.NOTHING_MEASURED),
    ],
)
def test_the_exit_code_tells_what_was_asked_for_and_not_measured(statuses, named, code):
    assert exit_code(results(*statuses), named) == code


@pytest.mark.parametrize("yardstick", ["attention := v", "uniform attention"])
def test_a_yardstick_is_no_backend_that_was_asked_for(yardstick):
    labels = (yardstick, "window")
    assert exit_code(results(BROKEN, labels=labels), ["window"]) == exits.NOTHING_MEASURED
    assert exit_code(results(BROKEN, "ok", labels=labels), ["window"]) == exits.DONE


@pytest.mark.parametrize(("status", "code"), [(REFUSED, exits.DONE), (SKIPPED, exits.SOME_NOT_MEASURED)])
def test_a_backend_that_refuses_some_inputs_and_is_measured_on_others_is_expected(status, code):
    measured, (*_, last) = results().records, results(status).records
    elsewhere = replace(last, case=replace(last.case, inputs="decoder(layer=19)"))
    assert exit_code(Results([*measured, elsewhere], environment={}), ["linformer"]) == code


def test_an_interruption_wins_over_all_else():
    found = results(BROKEN)
    assert exit_code(Results(found.records, environment={}, interrupted=True), None) == exits.INTERRUPTED


def test_tables_and_the_folder_go_to_stdout_and_notes_to_stderr(tmp_path, capsys):
    found = Results(costs(lengths=(256, 512)), environment={}, notes=["a note"])
    with pytest.raises(typer.Exit) as end:
        finish(found, None, folder=tmp_path, as_json=False)
    out, err = capsys.readouterr()
    assert end.value.exit_code == exits.DONE and err == "a note\n"
    assert "window" in out and out.splitlines()[-1] == str(tmp_path)


@pytest.mark.parametrize("made", [costs, errors])
def test_json_on_stdout_is_one_document_with_all_that_was_found(made, tmp_path, capsys):
    found = Results(made(), environment={"processor": "P"}, notes=["a note"])
    with pytest.raises(typer.Exit):
        finish(found, None, folder=tmp_path, as_json=True)
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert len(document["records"]) == len(found.records) and document["environment"] == {"processor": "P"}
    assert document["sentences"] == found.sentences() and document["notes"] == ["a note"]
    assert document["interrupted"] is False and err.strip() == str(tmp_path)
