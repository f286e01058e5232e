"""Training by turns: what curves depend on, where runs end, what becomes of the models."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_training import LINES, TINY, run

from efficient_attn.errors import DataError, OptionError, UnsupportedError
from efficient_attn.report.files import write
from efficient_attn.studies import find, loop
from efficient_attn.studies.train import rounds
from efficient_attn.studies.train.trainer import Trainer
from efficient_attn.transformer.language_model import LanguageModel


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch, undrawn):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "text.txt"
    path.write_bytes(LINES)
    return path


def learner(backend="exact", **changed):
    """A trainer of a planned run."""
    plan = find("train").plan([backend], **{**TINY, "text": "text.txt", "size": 4, "steps": 2, **changed})
    (trainer,) = (one for one in plan.attach.__self__._trainers if one.variant.backend == backend)
    return trainer


def test_models_learn_and_exact_attention_is_always_among_them():
    results = run(steps=40, every=10)
    assert [record.case.label for record in results.records] == [
        "exact", "window(window=4)", "performer-positive(num_features=4)"]  # fmt: skip
    for record in results.records:
        first, last = (
            record.held_out_bits_per_byte[0],
            record.held_out_bits_per_byte[-1],
        )
        assert record.train_steps == (10, 20, 30, 40) and last < first < 9
        assert record.parameter_bytes and len(record.held_out_bits_per_byte_windows) == 8
        assert list(record.train_seconds_s) == sorted(record.train_seconds_s)


def test_all_models_see_the_same_batches_and_begin_with_the_same_weights():
    one, other = learner(), learner("performer-positive")
    assert torch.equal(one.task.batch(one.step).wanted, other.task.batch(other.step).wanted)
    own, theirs = one.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(own[name], theirs[name]) for name in own)


def test_the_bits_of_a_window_are_those_of_its_bytes():
    one = learner()
    model, (read,), wanted = one.model.eval(), *one.task.held_out
    one.advance()
    one.evaluate()
    with torch.no_grad():
        logs = model(read[:1]).double().log_softmax(dim=-1)
    bits = [-float(logs[0, place, wanted[0, place]]) / torch.tensor(2.0).log().item() for place in range(8)]
    assert one.progress.held_out[0] == pytest.approx(sum(bits) / 8, rel=1e-6)


def test_a_run_ends_with_the_round_that_still_fits_its_budget(monkeypatch):
    now = 0.0

    def lasting(of):
        def one_second(self):
            nonlocal now
            now += 1.0
            of(self)

        return one_second

    monkeypatch.setattr(Trainer, "advance", lasting(Trainer.advance))
    monkeypatch.setattr(Trainer, "evaluate", lasting(Trainer.evaluate))
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now))
    # Two steps and an evaluation of three models: nine seconds of a round.
    records = run(steps=None, budget_s=30).records
    assert {record.train_steps[-1] for record in records} == {6}
    ended = run(steps=20, budget_s=30)
    assert {record.train_steps[-1] for record in ended.records} == {6}
    assert "The budget ended training at step 6 of 20: --budget raises it, --resume goes on." in ended.notes
    assert not any("budget" in note for note in run(steps=6, budget_s=30).notes)


def test_the_first_step_has_the_first_rate_of_the_schedule():
    one = learner()
    one.advance()
    # The warm-up takes 20 steps to a peak of 0.01.
    assert one._optimiser.param_groups[0]["lr"] == pytest.approx(0.01 / 20, rel=1e-12)


def test_a_model_whose_loss_is_no_number_ends_alone(monkeypatch):
    advance = Trainer.advance

    def broken(self):
        if self.variant.backend == "window" and self.step == 3:
            with torch.no_grad():
                self.model.embedding.weight.fill_(float("nan"))
        advance(self)

    monkeypatch.setattr(Trainer, "advance", broken)
    exact, window, performer = run(steps=6).records
    assert (window.status, window.reason) == (
        "error",
        "loss or gradient of step 4 are not finite",
    )
    assert window.train_steps == (2,) and exact.train_steps == performer.train_steps == (2, 4, 6)


def test_what_breaks_ends_alone_and_what_cannot_be_written_ends_the_run(monkeypatch):
    forward = LanguageModel.forward

    def broken(self, tokens):
        if self.stack.blocks[0].attention.backend.spec.name == "window" and self.training:
            raise RuntimeError("it broke\nhere")
        return forward(self, tokens)

    monkeypatch.setattr(LanguageModel, "forward", broken)
    exact, window, performer = run(steps=2).records
    assert (window.status, window.reason, window.train_steps) == (
        "error",
        "RuntimeError: it broke here",
        (),
    )
    assert exact.status == performer.status == "ok"
    monkeypatch.setattr(LanguageModel, "forward", forward)
    monkeypatch.setattr(rounds, "save_checkpoint", lambda *given: write(Path("none/file"), ""))
    with pytest.raises(DataError, match="Cannot write none/file: No such file"):
        run(steps=2, out="out")


def test_layers_have_draws_of_their_own_and_two_seeds_are_two_models():
    one = learner("performer-positive", num_layers=2).model
    first, second = (block.attention.backend.core.features.projection for block in one.stack.blocks)
    assert not torch.equal(first, second)
    assert not torch.equal(learner().model.embedding.weight, learner(seed=1).model.embedding.weight)


def test_what_is_calibrated_says_on_what():
    exact, full = run(backends=["performer-full"], steps=2).records
    assert full.calibrated_on == "a batch of the training text" and exact.calibrated_on is None


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"backends": ["linformer"]},
            UnsupportedError,
            "'linformer' cannot be causal. Causal backends",
        ),
        (
            {"steps": 3},
            OptionError,
            "steps=3 does not end with an evaluation; name a multiple of every=2",
        ),
        ({"steps": 0}, OptionError, "steps is at least 1"),
        (
            {"budget_s": 0},
            OptionError,
            "budget_s is a number of seconds above 0, not 0",
        ),
        (
            {"learning_rate": float("nan")},
            OptionError,
            "learning_rate is a finite number above 0, not nan",
        ),
        ({"model_dim": 9}, OptionError, "model_dim=9 is not divided by num_heads=2"),
        ({"size": 0}, OptionError, "size is at least 1"),
        ({"resume": True}, OptionError, "resume needs out"),
    ],
)
def test_a_wrong_request_is_refused(changed, error, message):
    with pytest.raises(error, match=message):
        run(**changed)


def test_the_case_of_a_curve_names_what_was_trained():
    case = run(steps=2).records[0].case
    assert (case.kind, case.inputs, case.tokens, case.layers) == (
        "train",
        "text.txt",
        8,
        1,
    )
