"""The language model around a backend: streaming, causality, one set of weights for all backends."""

import pytest
import torch

import efficient_attn as ea
from efficient_attn.errors import OptionError
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
