"""Runs of associative recall: refusals, repetition, interruption, errors and what exact attention learns."""

import pytest
import torch

import efficient_attn as ea
from efficient_attn.measure.record import Record
from efficient_attn.measure.records import line, parse
from efficient_attn.studies.recall import measure as recall_training
from efficient_attn.studies.recall.view import contests
from efficient_attn.studies.results import read

TINY = {
    "pairs": 8,
    "classes": 4,
    "queries": 4,
    "gap": 4,
    "steps": 2,
    "seeds": 2,
    "sizes": (4,),
    "batch": 2,
    "head_dim": 8,
    "threads": 1,
}
NAMES = ["exact", "performer-positive"]


@pytest.fixture
def two_threads():
    """Not the one thread that the runs here ask for."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_run_is_the_same_again_and_leaves_the_generator_and_the_threads_alone(two_threads):
    state = torch.get_rng_state()
    runs = [ea.recall(NAMES, **TINY) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == 2
    kept = [[(r.accuracy, r.output_relative_error, r.answers) for r in run.records] for run in runs]
    # Exact attention, two controls and the features, of two seeds.
    assert kept[0] == kept[1] and len(kept[0]) == 8
    assert {record.status for record in runs[0].records} == {"ok"}


def test_sizes_beyond_the_sequence_are_left_out():
    results = ea.recall(["window", "performer-positive"], **TINY | {"sizes": (8, 32), "seeds": 1, "steps": 1})
    labels = [record.case.label for record in results.records]
    # A window that is not causal is odd: at size 8 it is the control.
    assert labels[2:] == [
        "window(window=9)",
        "performer-positive(num_features=8)",
        "performer-positive(num_features=32)",
    ]


def test_an_interrupted_run_keeps_what_was_trained_and_goes_on_there(tmp_path, monkeypatch):
    begun = []

    def measure(entry, target, course):
        begun.append(entry.label)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return Record(case=entry, accuracy=0.5, answers=4, chance=0.25)

    monkeypatch.setattr(recall_training, "measure", measure)
    cut = ea.recall(NAMES, **TINY, out=tmp_path)
    assert cut.interrupted and len(read(tmp_path).records) == 2
    whole = ea.recall(NAMES, **TINY, out=tmp_path, resume=True)
    assert not whole.interrupted and len(read(tmp_path).records) == 8 and len(begun) == 3 + 6
    with pytest.raises(ea.DataError, match="holds records of another run"):
        ea.recall(NAMES, **TINY, out=tmp_path)


def test_what_a_backend_raises_is_its_result_and_ends_nothing_else():
    def broken(q, k, v):
        raise RuntimeError("it broke here")

    results = ea.recall([broken], **TINY | {"seeds": 1})
    assert [record.status for record in results.records] == ["ok", "ok", "ok", "error"]
    assert "it broke here" in results.tables()[0].notes[-1]


@pytest.mark.parametrize(
    ("factor", "reason"), [(float("inf"), "entries of the output are not finite"), (1e30, "the loss was")]
)
def test_an_output_or_a_loss_that_is_not_finite_is_an_error_and_no_accuracy(factor, reason):
    results = ea.recall([lambda q, k, v: v * factor], **TINY | {"seeds": 1})
    last = parse(line(results.records[-1]).encode(), "here")
    assert last.status == "error" and last.accuracy is None and reason in last.reason


@pytest.mark.slow
def test_exact_attention_learns_to_look_keys_up_and_the_controls_never_do():
    small = {"pairs": 16, "classes": 4, "queries": 8, "gap": 4, "seeds": 2, "steps": 300}
    (one,) = contests(ea.recall(["exact"], **small, sizes=(8,), threads=1).records)
    assert not one.exact.at_chance and one.exact.accuracy.mean >= 0.99
    assert len(one.controls) == 2 and all(row.at_chance for row in one.controls)
