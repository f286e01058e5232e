"""Generation: greedy, drawn, reproducible, through any step that carries a state."""

import pytest
import torch
from torch import Tensor

import efficient_attn as ea

VOCABULARY = 7
FIRST = torch.tensor([[2, 3], [5, 6]])


def successor(ids: Tensor, state: int | None) -> tuple[Tensor, int]:
    """A model that finds the number after the last one the likeliest; its state counts tokens."""
    logits = -((torch.arange(VOCABULARY) - ids[..., None] - 1) % VOCABULARY).float()
    return logits, (state or 0) + ids.shape[1]


def test_greedy_generation_takes_the_likeliest_token_each_time() -> None:
    got = ea.generate(successor, FIRST, 4)
    assert got.tolist() == [[4, 5, 6, 0], [0, 1, 2, 3]]
    assert got.dtype == FIRST.dtype


def test_a_step_is_given_the_first_tokens_and_then_one_at_a_time_with_the_state() -> None:
    calls = []

    def step(ids: Tensor, state: int | None) -> tuple[Tensor, int]:
        calls.append((ids.shape[1], state))
        return successor(ids, state)

    ea.generate(step, FIRST, 3)
    assert calls == [(2, None), (1, 2), (1, 3)]


def test_draws_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    once, again, other = (ea.generate(successor, FIRST, 30, temperature=2.0, seed=s) for s in (1, 1, 2))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_draws_have_the_frequencies_of_the_tempered_softmax() -> None:
    rows, temperature = 20_000, 2.0
    drawn = ea.generate(successor, torch.zeros(rows, 1, dtype=torch.int64), 1, temperature=temperature)
    logits, _ = successor(torch.zeros(1, 1, dtype=torch.int64), None)
    expected = (logits[0, 0].double() / temperature).softmax(dim=-1)
    frequency = drawn.flatten().bincount(minlength=VOCABULARY) / rows
    standard_error = (expected * (1 - expected) / rows).sqrt()
    assert ((frequency - expected).abs() < 5 * standard_error).all()


def test_top_k_draws_among_the_likeliest_only() -> None:
    first = torch.zeros(2000, 1, dtype=torch.int64)
    drawn = ea.generate(successor, first, 1, temperature=5.0, top_k=3)
    assert set(drawn.flatten().tolist()) == {1, 2, 3}
    assert torch.equal(
        ea.generate(successor, FIRST, 5, temperature=5.0, top_k=1), ea.generate(successor, FIRST, 5)
    )


def test_nothing_to_generate_is_no_tokens() -> None:
    assert ea.generate(successor, FIRST, 0).shape == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"first": FIRST.float()}, ea.DtypeError, "first holds token numbers.*float32"),
        ({"first": FIRST[:, :0]}, ea.ShapeError, r"first has shape \[2, 0\].*at least 1 token"),
        ({"tokens": -1}, ea.OptionError, "tokens is at least 0"),
        ({"temperature": -0.5}, ea.OptionError, "temperature is at least 0, not -0.5"),
        ({"top_k": 0}, ea.OptionError, "top_k is at least 1"),
        ({"seed": 0.5}, ea.DtypeError, "seed is a whole number"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        ea.generate(successor, **{"first": FIRST, "tokens": 2, **arguments})
