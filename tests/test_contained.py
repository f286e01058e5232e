"""Code of somebody else ends nothing but itself: what it raises is an error, and Ctrl-C is still Ctrl-C."""

import signal
import sys

import pytest
import torch

import efficient_attn as ea
from efficient_attn import mse
from efficient_attn.contained import contained, described
from efficient_attn.errors import DataError
from efficient_attn.external import load_spec
from efficient_attn.registry import BackendSpec, Capabilities, NoOptions


def leaves(q, k, v):
    sys.exit("goodbye")


def test_ctrl_c_passes():
    with pytest.raises(KeyboardInterrupt), contained(), contained():
        signal.raise_signal(signal.SIGINT)


def test_an_error_is_described_in_one_short_line_whatever_its_text_does():
    class Textless(Exception):
        def __str__(self):
            sys.exit("no text")

    assert described(Textless()) == "Textless"
    assert len(described(ValueError("x" * 1000))) == 300


def test_an_error_names_the_last_line_of_the_file_that_raised_it_and_no_line_of_a_library(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("import torch\ndef attend(q, k, v):\n    return torch.einsum('ab->c', q)")
    with pytest.raises(RuntimeError) as raised:
        ea.build(load_spec(f"{path}:attend"), head_dim=1)(*torch.ones(3, 1, 1, 1, 1))
    assert described(raised.value).endswith(" (own.py, line 3)")


def test_studies_in_this_process_go_on_after_a_backend_or_a_builder_that_leaves_or_a_wrong_output():
    def nothing(q, k, v):
        return None

    spec = BackendSpec(
        name="built",
        summary="It is never built.",
        options_type=NoOptions,
        capabilities=Capabilities(causal=True),
        builder=lambda problem, options: leaves(None, None, None),
    )
    said = f"SystemExit: goodbye (test_contained.py, line {leaves.__code__.co_firstlineno + 1})"
    results = mse([leaves, spec, nothing, "window"], inputs="gaussian", seq_lens=16, norms=(1,), sizes=(4,))
    reasons = {record.case.backend: record.reason for record in results.records}
    assert reasons["leaves"] == reasons["built"] == said and not results.interrupted
    assert reasons["nothing"].startswith("WrongOutputError: ") and reasons["window"] is None
    (record,) = ea.check(leaves, on_fail="collect", only=["the_same_call_gives_the_same_bits"])
    assert record.outcome == "broken" and said in record.detail


def test_an_import_that_prints_and_leaves_is_a_line_that_names_the_file_and_stdout_is_empty(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("print('noise')\ndef __getattr__(name):\n    raise SystemExit(name)")
    with pytest.raises(DataError, match=r"mine\.py cannot be imported: SystemExit: attend \(mine.*3\)\.$"):
        load_spec(f"{path}:attend")
    assert capsys.readouterr() == ("", "noise\n")
