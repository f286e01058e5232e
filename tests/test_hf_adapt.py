"""Adaptation of backends to a tiny model: fidelity on held-out windows, resume, saving and loading."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from hf_adapting import adapt, loaded, record, values, windows_of
from hf_models import bert, llama, saved

import efficient_attn as ea
from efficient_attn.integrations.transformers import distillation as distilling
from efficient_attn.integrations.transformers.students import AttentionCall, Student
from efficient_attn.studies.adapt import training

LEARNED, HEDGEHOG = " · adapted", "linear-hedgehog"
RANK = {"linformer": {"rank": [4]}}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return saved(bert(), tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def results(encoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return adapt(encoder, [HEDGEHOG, "window"], options={"window": {"window": [3]}}, out=folder), folder


def test_training_brings_every_layer_nearer_and_leaves_others_as_they_are(results):
    found, _ = results
    for layer in range(3):
        before, after = (record(found, HEDGEHOG + end, layer, "adapt") for end in ("", LEARNED))
        assert 0 < after.output_relative_error < 0.9 * before.output_relative_error
        assert after.output_distance < before.output_distance
        assert before.adapt_learning_rate is None and after.adapt_learning_rate in training.RATES
    cost = record(found, HEDGEHOG + LEARNED, None, "adapt")
    # Four heads of 8 entries, with a map for queries and one for keys in each of three layers.
    assert cost.adapted_parameters == 3 * 4 * 2 * 8 * 9
    assert cost.adapt_steps == 20 and cost.adapt_s > 0
    assert {one.case.label for one in found.records} == {HEDGEHOG, HEDGEHOG + LEARNED, "window(window=3)"}
    (table,) = found.tables()
    assert " → " in table.rows[0][2] and " → " not in table.rows[4][2]
    assert any(f"Nearest to the model: {HEDGEHOG}{LEARNED}" in sentence for sentence in found.sentences())


def test_the_saved_backends_are_loaded_with_the_model(results, encoder):
    found, folder = results
    _, error = loaded(encoder, folder / "adapted" / HEDGEHOG)
    assert error == pytest.approx(record(found, HEDGEHOG + LEARNED).hidden_relative_error, rel=1e-4)


def test_an_interrupted_adaptation_ends_as_if_never_interrupted(results, encoder, tmp_path, monkeypatch):
    whole, _ = results
    request = {"options": {"window": {"window": [3]}}, "out": tmp_path / "run"}
    advance, steps = distilling.Distillation.advance, []
    # During the choice of learning rates, and after it.
    for stop in (1, 11, None):

        def advanced(self, ids, stop=stop):
            if self.step == stop:
                raise KeyboardInterrupt
            steps.append(self.step)
            advance(self, ids)

        monkeypatch.setattr(distilling.Distillation, "advance", advanced)
        found = adapt(encoder, [HEDGEHOG, "window"], resume=bool(steps), **request)
        assert (len(found.records) < len(whole.records)) == (stop is not None)
    assert steps == list(range(20))
    assert values(found) == values(whole)
    with pytest.raises(ea.DataError, match="name a new folder"):
        adapt(encoder, [HEDGEHOG, "window"], resume=True, steps=21, **request)


def test_a_damaged_checkpoint_is_refused(encoder, tmp_path):
    adapt(encoder, [HEDGEHOG], steps=2, out=tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / f"{HEDGEHOG}.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\1\2\3\4")
    (tmp_path / "run" / "records.jsonl").unlink()
    (found,) = (
        one
        for one in adapt(encoder, [HEDGEHOG], steps=2, out=tmp_path / "run", resume=True).records
        if one.status != "ok"
    )
    assert "is damaged or no checkpoint" in found.reason


def test_held_out_windows_neither_train_nor_validate(encoder, monkeypatch):
    seen = []
    start, advance = distilling.Distillation.__init__, distilling.Distillation.advance

    def started(self, model, sites, backends, validation, **settings):
        seen.extend(validation)
        start(self, model, sites, backends, validation, **settings)

    monkeypatch.setattr(distilling.Distillation, "__init__", started)
    monkeypatch.setattr(
        distilling.Distillation, "advance", lambda self, ids: (seen.append(ids), advance(self, ids))
    )
    adapt(encoder, [HEDGEHOG], steps=4, held_out=2)
    windows = [window.tolist()[0] for window in windows_of(encoder)]
    used = [row for ids in seen for row in ids.tolist()]
    assert used and all(row in windows[:-2] for row in used)
    (validating,) = seen[0].tolist()
    assert validating not in [row for ids in seen[1:] for row in ids.tolist()]


def test_a_harmful_training_ends_with_the_backends_before_it(encoder):
    found = adapt(encoder, ["linformer"], learning_rate=3.0, steps=3, options=RANK)
    before, after = (record(found, "linformer(rank=4)" + end) for end in ("", LEARNED))
    assert after.hidden_relative_error == before.hidden_relative_error
    assert record(found, "linformer(rank=4)" + LEARNED, 0, "adapt").adapt_learning_rate is None


def test_a_layer_goes_on_with_the_learning_rate_that_validates_best():
    backend = ea.build("linformer", head_dim=4, max_tokens=8, rank=2)
    call = AttentionCall(*torch.randn(3, 1, 2, 8, 4, generator=torch.Generator().manual_seed(0)), None, None)
    call = call._replace(out=ea.attention(call.q, call.k, call.v))
    student = Student("0", backend, (10.0, 0.01, 1e-6))
    for choose in (False, True):
        student.validate(call)
        student.keep_best(choose=choose)
        student.learn(call, 1.0)
    assert {name.split(":")[0] for name in student.tensors()} == {"best", "0.01"}
    with torch.no_grad():
        error = (student.backend(call.q, call.k, call.v) - call.out).norm() / call.out.norm()
    assert (student.rate, student.loss) == (0.01, pytest.approx(float(error) ** 2, rel=1e-5))


def test_backends_with_a_calibration_are_calibrated_and_causal_models_are_served(tmp_path):
    model = saved(llama(), tmp_path / "model")
    clusters = {"target_error": [0.05], "window": [4], "clusters": [4]}
    found = adapt(
        model,
        ["performer-full", HEDGEHOG, "window-clusters"],
        steps=3,
        options={"window-clusters": clusters},
    )
    assert {one.status for one in found.records} == {"ok"}
    (table,) = found.tables()
    shown = {row[0]: row[2] for row in table.rows}
    for label in ("performer-full", "window-clusters(target_error=0.05, window=4, clusters=4)"):
        assert record(found, label + LEARNED, None, "adapt").adapt_steps == 0
        assert record(found, label + LEARNED).flops > 0
        assert label not in {one.case.label for one in found.records}
        assert shown[label].startswith("– → ")
    assert any("training windows: performer-full, window-clusters" in note for note in table.notes)
    assert record(found, HEDGEHOG + LEARNED).next_token_kl > 0
    assert "nats" in found.tables()[0].rows[0][3]


@pytest.mark.parametrize(
    ("backends", "changes", "message"),
    [
        (["window"], {}, "Nothing to adapt in window"),
        ([HEDGEHOG], {"held_out": 99}, "99 are held out; name longer texts"),
        ([HEDGEHOG], {"learning_rate": 0.0}, "learning_rate is a finite number above 0"),
    ],
)
def test_a_request_without_anything_to_train_or_measure_on_is_refused(encoder, backends, changes, message):
    with pytest.raises(ea.AttentionError, match=message):
        adapt(encoder, backends, **changes)


def test_a_training_that_diverges_says_so(encoder):
    found = adapt(encoder, ["linformer"], learning_rate=1e30, steps=5, options=RANK)
    failed = record(found, "linformer(rank=4)" + LEARNED, None, "adapt")
    assert (failed.status, "lower the learning rate" in failed.reason) == ("unsupported", True), failed.reason
