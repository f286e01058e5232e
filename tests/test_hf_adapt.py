"""Adaptation of backends to a tiny model: fidelity on held-out windows, resume, saving and loading."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5", reason="the extra [hf] is not installed")

from hf_models import bert, llama, saved, texts

import efficient_attn as ea
from efficient_attn.integrations.transformers import distillation as distilling
from efficient_attn.integrations.transformers import load
from efficient_attn.studies.adapt import training

TOKENS = 12
LEARNED, HEDGEHOG = " · adapted", "linear-hedgehog"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return saved(bert(), tmp_path_factory.mktemp("encoder"))


def adapt(model, backends, **changes):
    request = {"texts": texts(), "seq_len": TOKENS, "steps": 30, "held_out": 1, "threads": 1}
    return ea.adapt(model, backends, **{**request, **changes})


def record(results, label, layer=None, kind="swap"):
    (found,) = (
        one
        for one in results.records
        if (one.case.label, one.case.layer, one.case.kind) == (label, layer, kind)
    )
    return found


def values(results):
    """All measured values but times."""
    return {one.case.key: {**one.measured, "adapt_s": None} for one in results.records}


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
    cost = record(found, HEDGEHOG + LEARNED, None, "adapt")
    # Four heads of 8 entries, with a map for queries and one for keys in each of three layers.
    assert cost.adapted_parameters == 3 * 4 * 2 * 8 * 9
    assert cost.adapt_steps == 30 and cost.adapt_s > 0
    assert {one.case.label for one in found.records} == {HEDGEHOG, HEDGEHOG + LEARNED, "window(window=3)"}
    (table,) = found.tables()
    assert " → " in table.rows[0][2] and " → " not in table.rows[4][2]
    assert any(f"Nearest to the model: {HEDGEHOG}{LEARNED}" in sentence for sentence in found.sentences())


def test_the_saved_backends_are_loaded_with_the_model(results, encoder):
    found, folder = results
    model = transformers.AutoModelForMaskedLM.from_pretrained(encoder).eval()
    windows = _windows(encoder)
    with torch.no_grad():
        exact = model(windows[-1], output_hidden_states=True).hidden_states[-1]
        load(folder / "adapted" / HEDGEHOG, into=model)
        given = model(windows[-1], output_hidden_states=True).hidden_states[-1]
    error = float((given - exact).norm() / exact.norm())
    assert error == pytest.approx(record(found, HEDGEHOG + LEARNED).hidden_relative_error, rel=1e-4)


def _windows(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [
        row
        for text in texts().values()
        for row in tokenizer(text, truncation=True, max_length=TOKENS, return_overflowing_tokens=True)[
            "input_ids"
        ]
    ]
    return [torch.tensor([row]) for row in rows if len(row) == TOKENS]


def test_an_interrupted_adaptation_ends_as_if_never_interrupted(results, encoder, tmp_path, monkeypatch):
    whole, _ = results
    request = {"options": {"window": {"window": [3]}}, "out": tmp_path / "run"}
    advance = distilling.Distillation.advance

    def interrupted(self, ids):
        if self.step == 11:
            raise KeyboardInterrupt
        advance(self, ids)

    with monkeypatch.context() as patched:
        patched.setattr(distilling.Distillation, "advance", interrupted)
        # Killed processes leave the last checkpoint, which is of the eleventh step here.
        patched.setattr(training, "_CHECKPOINT_S", 0.0)
        first = adapt(encoder, [HEDGEHOG, "window"], **request)
    assert len(first.records) < len(whole.records)
    steps = []
    monkeypatch.setattr(
        distilling.Distillation, "advance", lambda self, ids: (steps.append(self.step), advance(self, ids))
    )
    resumed = adapt(encoder, [HEDGEHOG, "window"], resume=True, **request)
    assert steps == list(range(11, 30))
    assert values(resumed) == values(whole)
    with pytest.raises(ea.DataError, match="name a new folder"):
        adapt(encoder, [HEDGEHOG, "window"], resume=True, steps=31, **request)


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


def test_backends_with_a_calibration_are_calibrated_and_causal_models_are_served(tmp_path):
    model = saved(llama(), tmp_path / "model")
    found = adapt(model, ["performer-full", HEDGEHOG], steps=3)
    assert {one.status for one in found.records} == {"ok"}
    assert record(found, "performer-full" + LEARNED, None, "adapt").adapt_steps == 0
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
    found = adapt(encoder, ["linformer"], learning_rate=1e30, steps=5, options={"linformer": {"rank": [4]}})
    failed = record(found, "linformer(rank=4)" + LEARNED, None, "adapt")
    assert (failed.status, "lower the learning rate" in failed.reason) == ("unsupported", True), failed.reason
