"""Advice that ends early, by an interruption or a budget, and is resumed; its times are given."""

import signal
import time
from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_advice import advise, plans

from efficient_attn.errors import DataError
from efficient_attn.measure.variants import OWN
from efficient_attn.studies.advise.outcomes import LAYERS
from efficient_attn.studies.progress import Durations
from efficient_attn.studies.results import read
from efficient_attn.studies.swap import measure

pytestmark = pytest.mark.usefixtures("given_times")


def labels(results, kind):
    return {one.case.label for one in results.records if one.case.kind == kind and one.status == "ok"}


def test_an_interrupted_advice_resumes_and_ends_as_if_never_interrupted(
    encoder, advised, tmp_path, monkeypatch
):
    real, calls = measure.distance, []

    def interrupted(*arguments, **named):
        calls.append(1)
        if len(calls) == 6:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(measure, "distance", interrupted)
        stopped = advise(encoder, min_cosine=0.9, out=tmp_path)
    assert stopped.interrupted and stopped.notes[0].startswith("Not measured: ")
    ended = advise(encoder, min_cosine=0.9, out=tmp_path, resume=True)
    for kind in ("swap", "time"):
        assert labels(ended, kind) == labels(advised, kind)
    assert ended.sentences() == advised.sentences()
    assert ended.files() == advised.files()


def test_a_budget_that_ends_among_the_layers_leaves_the_plan_to_the_resumed_run(
    encoder, tmp_path, monkeypatch
):
    """The smaller window is the nearer one of layers that were not measured."""
    given = {"backends": ["window"], "options": {"window": {"window": [15, 5]}}, "min_cosine": 1 - 2.2e-5}
    whole, real, late_s = advise(encoder, **given), measure.distance, [0.0]

    def slow(case, *arguments, **named):
        if (case.layer, case.label) == (2, "window(window=15)"):
            late_s[0] = 1000.0
        return real(case, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(measure, "distance", slow)
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s[0])
        patched.setattr("efficient_attn.studies.engine.time", clock)
        stopped = advise(encoder, out=tmp_path, budget_s=60.0, **given)
    assert [one.status for one in stopped.records].count("skipped") == 4 and not plans(stopped)
    (sentence,) = stopped.sentences()
    assert "At 24 tokens not measured to the end" in sentence and "stay with exact" not in sentence
    ended = advise(encoder, out=tmp_path, resume=True, budget_s=60.0, **given)
    assert plans(ended) == plans(whole) and ended.sentences() == whole.sentences()


def test_a_plan_of_the_layers_within_the_budget_is_made_anew_by_the_resumed_run(
    encoder, tmp_path, monkeypatch
):
    given = {"backends": ["window"], "options": {"window": {"window": [15, 5]}}, "min_cosine": 1 - 2.2e-5}
    whole, real, timed = advise(encoder, **given), Durations.next_s, measure.cost

    def next_s(self, point):
        late = point.case.layer is not None and point.case.label == "window(window=5)"
        return 1e9 if late else real(self, point)

    def interrupted(case, *arguments, **named):
        if case.backend == "plan":
            raise KeyboardInterrupt
        return timed(case, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Durations, "next_s", next_s)
        stopped = advise(encoder, out=tmp_path, **given)
    assert plans(stopped)["plan"] != plans(whole)["plan"]
    assert (
        stopped.sentences()[0].startswith("Faster from 24") and "3 points did not" in stopped.sentences()[0]
    )
    with monkeypatch.context() as patched:
        patched.setattr(measure, "cost", interrupted)
        advise(encoder, out=tmp_path, resume=True, budget_s=60.0, **given)
    # The folder holds the times of the earlier plan.
    assert "At 24 tokens not timed" in read(tmp_path).sentences()[0]
    ended = advise(encoder, out=tmp_path, resume=True, budget_s=60.0, **given)
    assert plans(ended) == plans(whole) and ended.sentences() == whole.sentences()
    assert ended.files() == whole.files()


def test_a_plan_without_layers_is_no_decision_where_the_budget_left_layers_out(encoder, monkeypatch):
    real = Durations.next_s
    monkeypatch.setattr(
        Durations, "next_s", lambda self, point: 1e9 if point.case.layer is not None else real(self, point)
    )
    (sentence,) = advise(encoder, budget_s=60.0, min_cosine=1 - 2.2e-5).sentences()
    assert "At 24 tokens not measured to the end" in sentence and "stay with exact" not in sentence


def test_times_that_an_interruption_cut_short_decide_nothing_and_are_taken_again(
    encoder, tmp_path, monkeypatch
):
    timed, rounds = measure.cost, []

    def interrupted(case, *arguments, **named):
        rounds.append(case.backend)
        if rounds.count("plan") == last:
            raise KeyboardInterrupt
        return timed(case, *arguments, **named)

    monkeypatch.setattr(measure, "cost", interrupted)
    last = 3
    stopped = advise(encoder, min_cosine=0.9, out=tmp_path)
    (sentence,) = stopped.sentences()
    assert sentence.startswith("Nothing is known to be faster") and "At 24 tokens undecided" in sentence
    assert LAYERS not in stopped.files()
    rounds.clear()
    last = 5
    ended = advise(encoder, min_cosine=0.9, out=tmp_path, resume=True)
    # Rounds in hand are kept.
    assert Counter(rounds) == {OWN: 2, "plan": 2}
    assert ended.sentences()[0].startswith("Faster from 24 tokens") and LAYERS in ended.files()


def test_a_run_is_not_resumed_for_another_target_or_other_backends(encoder, tmp_path):
    given = {"backends": ["window"], "options": None}
    advise(encoder, min_cosine=0.9, out=tmp_path, **given)
    with pytest.raises(DataError, match=r"has the target .*0.09.*, not .*0.5.*; name a new folder"):
        advise(encoder, min_cosine=0.5, out=tmp_path, resume=True, **given)
    with pytest.raises(DataError, match=r"has the candidates .*window.*, not .*linformer"):
        advise(encoder, min_cosine=0.9, out=tmp_path, resume=True, backends=["linformer"], options=None)
