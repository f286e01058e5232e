"""The language model and generation, greedy and drawn, through any step that carries a state."""

import pytest
import torch
from transformer_modules import DIM, HEADS

import efficient_attn as ea
from efficient_attn.errors import DataError

VOCABULARY = 7
FIRST = torch.tensor([[2, 3], [5, 6]])


def successor(ids, state):
    """A step whose likeliest token follows the last one; its state counts tokens."""
    logits = -((torch.arange(VOCABULARY) - ids[..., None] - 1) % VOCABULARY).float()
    return logits, (state or 0) + ids.shape[1]


def test_greedy_generation_takes_the_likeliest_token_and_passes_the_state_on():
    calls = []

    def step(ids, state):
        calls.append((ids.shape[1], state))
        return successor(ids, state)

    tokens = ea.generate(step, FIRST, 4)
    assert tokens.tolist() == [[4, 5, 6, 0], [0, 1, 2, 3]] and tokens.dtype == FIRST.dtype
    assert calls == [(2, None), (1, 2), (1, 3), (1, 4)]
    assert ea.generate(successor, FIRST, 0).shape == (2, 0)


def test_draws_follow_the_seed_and_leave_the_global_generator_alone():
    before = torch.random.get_rng_state()
    first, again, other = (ea.generate(successor, FIRST, 30, temperature=2.0, seed=s) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_draws_have_the_frequencies_of_the_tempered_softmax_among_the_top_k():
    rows, temperature = 20_000, 2.0
    start = torch.zeros(rows, 1, dtype=torch.int64)
    logits = successor(start[:1], None)[0][0, 0].double()
    for top_k in (None, 3):
        drawn = ea.generate(successor, start, 1, temperature=temperature, top_k=top_k)
        least = logits.topk(top_k or VOCABULARY)[0][-1]
        hidden = torch.zeros(VOCABULARY).masked_fill(logits < least, -torch.inf)
        expected = (logits / temperature + hidden).softmax(dim=-1)
        frequency = drawn.flatten().bincount(minlength=VOCABULARY) / rows
        standard_error = (expected * (1 - expected) / rows).sqrt()
        assert ((frequency - expected).abs() <= 5 * standard_error).all()


def test_a_language_model_decodes_from_its_state_as_from_the_whole_text():
    torch.manual_seed(0)
    model = ea.LanguageModel(DIM, HEADS, "performer-positive", num_layers=2, vocabulary=11).double().eval()
    ids = torch.randint(11, (2, 20))
    state, parts = None, []
    for part in ids.split([5, 1, 14], dim=1):
        logits, state = model.extend(part, state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids))

    def whole(new, past):
        text = new if past is None else torch.cat((past, new), dim=1)
        return model(text), text

    first = ids[:, :5]
    assert torch.equal(ea.generate(model.extend, first, 6), ea.generate(whole, first, 6))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5, "top_k": 2}])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_without_a_likeliest_token_are_an_error(value, sampling):
    def broken(ids, state):
        logits, state = successor(ids, state)
        # The last row, from the third token on.
        if state > 3:
            logits[1:, :, 0 if value == -torch.inf else 4 :] = value
        return logits, state

    with pytest.raises(DataError, match=r"^step returned logits with NaN or \+inf, or a row of -inf alone"):
        ea.generate(broken, FIRST, 6, **sampling)


@pytest.mark.parametrize(("temperature", "tokens"), [(1e-320, {4}), (torch.inf, {0, 3, 4})])
def test_any_temperature_draws_among_the_tokens_that_are_not_excluded(temperature, tokens):
    logits = torch.tensor([3.0, -torch.inf, -torch.inf, 2.0, 5.0])

    def step(ids, state):
        return logits.expand(*ids.shape, -1), state

    assert {*ea.generate(step, FIRST, 40, temperature=temperature).flatten().tolist()} == tokens
