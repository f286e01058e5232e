"""The advice without a model: attention alone on the shipped activations."""

import itertools
import random
import signal

import pytest

import efficient_attn as ea
from efficient_attn.errors import OptionError
from efficient_attn.runner.record import Case, Record
from efficient_attn.studies.advise.choice import best_layers, in_ranges
from efficient_attn.studies.compare.plan import MAX_ERROR
from efficient_attn.studies.results import Results

SHORT = (64, 96, 128, 160)


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    """Short calls at short lengths, timed as briefly as possible."""
    monkeypatch.setattr("efficient_attn.studies.loop._ROUND_S", 0.0)
    for module in ("findings", "activations"):
        monkeypatch.setattr(f"efficient_attn.studies.advise.{module}.PROBE", SHORT)


def advise(*backends, **changes):
    given = {"seq_lens": (512, 1024), "isolate": "none", "draws": 1, **changes}
    return ea.advise(backends=list(backends), **given)


def kinds(results):
    """{(kind, label, tokens)} of the records that were measured."""
    return {(one.case.kind, one.case.label, one.case.tokens) for one in results.records if one.status == "ok"}


def test_it_measures_predicts_and_concludes_over_lengths():
    given = {"window": {"window": [3, 257, 129]}}
    results = advise("exact", "window", options=given, seq_lens=(512, 1024), max_error=0.5)
    found, labels = kinds(results), [f"window(window={size})" for size in given["window"]["window"]]
    assert {("error", labels[1], 512), ("error", labels[1], 2048), ("time", "exact", 1024)} <= found
    predicted = [one for one in results.records if one.case.kind == "prediction"]
    assert {(one.case.label, one.case.tokens) for one in predicted} == set(
        itertools.product(labels, (512, 1024))
    )
    for one in predicted:
        assert 0 < one.predicted_speed_low <= one.predicted_speed <= one.predicted_speed_high
    # The nearest backends are timed first; one that is no nearer than the mean of the values is not timed.
    long = [one.case.label for one in results.records if (one.case.kind, one.case.tokens) == ("time", 1024)]
    assert long == ["exact", labels[1], labels[2]]
    assert ("time", labels[0], SHORT[-1]) in found
    (sentence,) = results.sentences()
    for part in (
        "512 tokens (encoder)",
        "2048 tokens (concatenated documents)",
        "50 %",
        f"{labels[1]} (error 0.",
    ):
        assert part in sentence
    assert "nothing but exact is within" in sentence
    wide = Results(results.records, environment={**results.environment, MAX_ERROR: 2.0})
    assert f"within 200 % of exact on every layer: {labels[1]} (error" in wide.sentences()[0]


def test_backends_that_are_slower_by_prediction_are_not_timed_at_long_lengths(monkeypatch):
    from efficient_attn.runner import worker

    own = worker.measure

    def fixed(case, **arguments):
        record = own(case, **arguments)
        if case.kind != "time":
            return record
        factor = 100.0 if case.label == "window" else 1.0
        return Record(case=case, times_s=(factor * 1e-6 * case.tokens,), round_sizes=(1,))

    monkeypatch.setattr(worker, "measure", fixed)
    found = kinds(advise("exact", "window"))
    assert ("time", "window", SHORT[-1]) in found
    assert ("prediction", "window", 1024) in found
    assert ("time", "window", 1024) not in found
    assert ("time", "exact", 1024) in found


@pytest.mark.slow
def test_an_interrupted_advice_names_the_rest_and_resumes(tmp_path, monkeypatch):
    from efficient_attn.runner import accuracy

    real, calls = accuracy.measure.output_error, itertools.count()

    def interrupted(*arguments):
        if next(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(accuracy.measure, "output_error", interrupted)
        stopped = advise("exact", "window", out=tmp_path)
    assert stopped.interrupted
    assert stopped.notes[0].startswith("Not tried: ") and "window" in stopped.notes[0]
    ended = advise("exact", "window", out=tmp_path, resume=True)
    assert kinds(ended) == kinds(advise("exact", "window"))


def test_a_limit_that_is_no_number_is_refused():
    with pytest.raises(OptionError, match="max_error is a finite number"):
        ea.advise(max_error=0.0)


def test_the_choice_of_layers_gains_most_within_the_limit():
    draw = random.Random(0)
    for _ in range(20):
        losses = {layer: {name: draw.random() for name in "abc"} for layer in range(4)}
        gains_s = {name: draw.random() for name in "ab"}
        limit = draw.random() * 2
        chosen = best_layers(losses, gains_s, limit)
        spent = sum(losses[layer][name] for layer, name in chosen.items())
        assert spent <= limit and "c" not in chosen.values()
        gained = sum(gains_s[name] for name in chosen.values())
        # Losses are rounded up to parts of the limit.
        assert gained >= best_by_trial(losses, gains_s, 0.97 * limit)


def best_by_trial(losses, gains_s, limit):
    best = 0.0
    for names in itertools.product((None, *gains_s), repeat=len(losses)):
        kept = [(layer, name) for layer, name in zip(losses, names, strict=True) if name]
        if sum(losses[layer][name] for layer, name in kept) <= limit:
            best = max(best, sum(gains_s[name] for _, name in kept))
    return best


def test_layers_are_shown_as_ranges():
    chosen = {0: "window", 2: "window", 3: "window", 1: "linformer"}
    assert in_ranges(chosen) == "window in layers 0, 2–3 and linformer in layer 1"
    assert in_ranges({}) == ""


def test_the_study_takes_no_records_of_other_studies():
    from efficient_attn.studies import find

    case = Case(
        kind="time",
        backend="exact",
        label="exact",
        num_heads=1,
        head_dim=1,
        tokens=1,
        dtype="float32",
        device="cpu",
        threads=1,
    )
    assert find("advise").own([Record(case=case, times_s=(1.0,))]) == []
