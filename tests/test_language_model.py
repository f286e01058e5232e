"""The language model around a backend: streaming, causality, one set of weights for all backends."""

import math

import pytest
import torch

import efficient_attn as ea
from efficient_attn.errors import OptionError
from efficient_attn.studies.train.config import optimiser, rate_at, update
from efficient_attn.transformer.language_model import LanguageModel


def model(backend="exact", **options):
    torch.manual_seed(0)
    return LanguageModel(16, 2, backend, num_layers=2, vocabulary=32, **options).double()


TOKENS = torch.randint(32, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("backend", ["exact", "window", "performer-positive", "linear-elu"])
def test_tokens_one_by_one_get_the_logits_of_the_whole_text(backend):
    one = model(backend)
    whole, state, parts = one(TOKENS), None, []
    for place in range(TOKENS.shape[1]):
        logits, state = one.extend(TOKENS[:, place : place + 1], state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


def test_models_of_two_backends_begin_with_the_same_weights():
    exact, other = model().state_dict(), model("performer-positive").state_dict()
    assert set(exact) <= set(other)
    assert all(torch.equal(exact[name], other[name]) for name in exact)


def test_a_model_generates_through_its_state():
    one = model("window", window=4)
    made = ea.generate(one.extend, TOKENS[:, :3], 5)
    following = torch.cat((TOKENS[:, :3], made), dim=1)
    assert torch.equal(one(following)[:, 2:-1].argmax(dim=-1), made)


def test_a_model_has_at_least_one_token():
    with pytest.raises(OptionError, match="vocabulary is at least 1, not 0"):
        LanguageModel(16, 2, num_layers=1, vocabulary=0)


def test_the_rate_rises_to_its_peak_and_falls_with_the_root_of_the_step():
    rates = [rate_at(step, peak=0.5, warmup=10) for step in range(1, 41)]
    assert rates[0] == 0.05 and rates[9] == max(rates) == 0.5
    assert math.isclose(rates[39], 0.25)


def test_an_update_goes_down_the_gradient_and_vectors_do_not_decay():
    one = torch.nn.Linear(3, 1)
    x = torch.ones(1, 3)
    learner = optimiser(one)
    assert [group["weight_decay"] > 0 for group in learner.param_groups] == [True, False]
    before = one(x).item()
    assert update(one, learner, one(x).sum(), rate=0.1)
    assert one(x).item() < before


def test_a_gradient_that_is_not_finite_changes_nothing():
    one = torch.nn.Linear(3, 1)
    learner, before = optimiser(one), one.weight.clone()
    assert not update(one, learner, one(torch.full((1, 3), math.inf)).sum(), rate=0.1)
    assert torch.equal(one.weight, before) and learner.state[one.weight]["step"] == 0
