"""Low-rank additions to the projections around replaced attention: training, saving, loading, refusals."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from hf_adapting import adapt, loaded, record, values
from hf_models import bert, gpt2, llama, modernbert, opt, saved

import efficient_attn as ea
from efficient_attn.integrations.transformers import distillation as distilling
from efficient_attn.integrations.transformers import load
from efficient_attn.integrations.transformers.low_rank import projections
from efficient_attn.integrations.transformers.swapping import sites_of
from efficient_attn.studies.adapt import training

LORA = " · LoRA"
NARROW = {"options": {"window": {"window": [3]}}, "lora": 2, "steps": 10}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return saved(bert(), tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def added(encoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return adapt(encoder, ["window"], out=folder, **NARROW), folder


def test_additions_to_the_projections_bring_any_backend_nearer_and_are_loaded_with_it(added, encoder):
    found, folder = added
    before, after = (record(found, "window(window=3)" + end) for end in ("", LORA))
    assert 0 < after.hidden_relative_error < 0.9 * before.hidden_relative_error
    cost = record(found, "window(window=3)" + LORA, None, "adapt")
    # Rank 2 of four projections, 32 by 32, in each of three layers.
    assert (cost.adapted_parameters, cost.adapt_steps) == (3 * 4 * 2 * (32 + 32), 10)
    assert cost.adapt_learning_rate in training.LORA_RATES
    (table,) = found.tables()
    assert table.rows[1][1] == "all, with LoRA" and " → " in table.rows[1][2]
    model, error = loaded(encoder, folder / "lora" / "window-window-3")
    assert error == pytest.approx(after.hidden_relative_error, rel=1e-4)
    with pytest.raises(ea.OptionError, match="load it anew"):
        load(folder / "lora" / "window-window-3", into=model)
    other = saved(bert(hidden_size=64), folder / "other")
    with pytest.raises(ea.DataError, match="has another shape"):
        loaded(other, folder / "lora" / "window-window-3")


def test_an_interrupted_training_of_additions_ends_as_if_never_interrupted(
    added, encoder, tmp_path, monkeypatch
):
    advance = distilling.Distillation.advance

    def stopped(self, ids):
        if self.step == 3:
            raise KeyboardInterrupt
        advance(self, ids)

    with monkeypatch.context() as patched:
        patched.setattr(distilling.Distillation, "advance", stopped)
        adapt(encoder, ["window"], out=tmp_path / "run", **NARROW)
    steps = []
    monkeypatch.setattr(
        distilling.Distillation, "advance", lambda self, ids: (steps.append(self.step), advance(self, ids))
    )
    found = adapt(encoder, ["window"], out=tmp_path / "run", resume=True, **NARROW)
    assert steps == list(range(3, 10))
    assert values(found) == values(added[0])


def test_harmful_additions_are_left_out_and_the_model_stays_as_it_is(encoder, monkeypatch):
    monkeypatch.setattr(training, "LORA_RATES", (100.0,))
    model = transformers.AutoModelForMaskedLM.from_pretrained(encoder).eval()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    found = adapt(model, ["window"], tokenizer=tokenizer, **{**NARROW, "steps": 1})
    before, after = (record(found, "window(window=3)" + end) for end in ("", LORA))
    assert after.hidden_relative_error == before.hidden_relative_error
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("make", "last"), [(bert, "output.dense"), (llama, "o_proj"), (opt, "out_proj")])
def test_projections_are_found_by_their_names(make, last):
    model = make()
    found = projections(model, sites_of(model))
    assert len(found) == 3 * 4
    assert all(model.get_submodule(name) is linear for name, linear in found.items())
    assert [name.endswith(last) for name in found] == [False, False, False, True] * 3


@pytest.mark.parametrize(("make", "words"), [(gpt2, r"c_attn \(Conv1D\)"), (modernbert, r"Wqkv \(Linear\)")])
def test_models_with_other_projections_are_refused_by_what_they_have(make, words):
    model = make()
    with pytest.raises(ea.UnsupportedError, match=words):
        projections(model, sites_of(model))
