"""Code of somebody else ends nothing but itself: what it raises is an error, and Ctrl-C is still Ctrl-C."""

import signal
import sys

import pytest
from looped import points, run

import efficient_attn as ea
from efficient_attn import mse, recall
from efficient_attn.contained import LeftError, contained, described
from efficient_attn.errors import DataError
from efficient_attn.external import load
from efficient_attn.measure.variants import Variant
from efficient_attn.measure.worker import measure
from efficient_attn.registry import BackendSpec, Capabilities, NoOptions
from efficient_attn.studies.show import show


def attend(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v


def leaves(q, k, v):
    sys.exit("goodbye")


class Ended(BaseException):
    pass


def ended(q, k, v):
    raise Ended("of its own kind")


LEAVING = {
    leaves: "SystemExit: goodbye",
    ended: "Ended: of its own kind",
}


@pytest.mark.parametrize("function", LEAVING)
def test_what_would_end_a_program_is_an_error_that_says_so(function):
    with pytest.raises(LeftError, match=LEAVING[function]), contained():
        function(None, None, None)


def test_ctrl_c_passes():
    with pytest.raises(KeyboardInterrupt), contained(), contained():
        signal.raise_signal(signal.SIGINT)


def test_an_error_is_described_in_one_short_line_whatever_its_text_does():
    class Textless(Exception):
        def __str__(self):
            sys.exit("no text")

    assert described(Textless()) == "Textless"
    assert described(ValueError("two\nlines" + "x" * 10_000_000))[:20] == "ValueError: two line"
    assert len(described(ValueError("x" * 1000))) == 300


def test_a_backend_that_leaves_is_one_record_and_the_others_are_measured():
    functions = {function.__name__: function for function in (*LEAVING, attend)}
    variants = [Variant(backend=name, label=name, target=target) for name, target in functions.items()]
    complete, records = run(points(variants, (16,), measure))
    outcomes = {record.case.label: (record.status, record.reason) for record in records}
    left = {function.__name__: ("error", text) for function, text in LEAVING.items()}
    assert complete and outcomes == {**left, "attend": ("ok", None)}


def test_studies_in_this_process_go_on_after_a_backend_or_a_builder_that_leaves():
    spec = BackendSpec(
        name="built",
        summary="It is never built.",
        options_type=NoOptions,
        capabilities=Capabilities(causal=True),
        builder=lambda problem, options: leaves(None, None, None),
    )
    said = LEAVING[leaves]
    for results in (
        mse([leaves, spec, "window"], inputs="gaussian", seq_lens=16, norms=(1,), sizes=(4,)),
        recall([leaves, spec], steps=1, seeds=1, sizes=(4,), pairs=16),
    ):
        reasons = {record.case.backend: record.reason for record in results.records}
        assert reasons["leaves"] == reasons["built"] == said and not results.interrupted
        assert reasons.get("window") is None
    assert show([leaves]).notes == (f"leaves: {said}",)
    (record,) = ea.check(leaves, on_fail="collect", only=["the_same_call_gives_the_same_bits"])
    assert record.outcome == "broken" and said in record.detail


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys\nsys.exit()", "SystemExit"),
        ("def __getattr__(name):\n    raise SystemExit(name)", "SystemExit: attend"),
    ],
    ids=["leaves", "late"],
)
def test_an_import_that_leaves_is_a_line_that_names_the_file(text, said, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"mine\.py cannot be imported: {said}\.$"):
        load(f"{path}:attend")


def test_what_a_file_prints_at_its_import_stays_out_of_stdout(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("print('noise')\ndef attend(q, k, v):\n    return v\n")
    assert load(f"{path}:attend").name == "mine.py:attend"
    assert capsys.readouterr() == ("", "noise\n")
