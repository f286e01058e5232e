"""The task of associative recall: its draws, and models of equal terms that differ in attention alone."""

import pytest
import torch
from recall_cases import TASK, asked

import efficient_attn as ea
from efficient_attn.measure.record import replace
from efficient_attn.studies.recall.measure import MEAN, floats_read, learner
from efficient_attn.studies.recall.plan import LEARNED, TESTED


def drawn(*, seed=0, stream=LEARNED, number=0):
    return TASK.draw(3, seed=seed, stream=stream, number=number)


def features(seed=0):
    return asked("performer-positive", seed=seed, options={"num_features": 6, "seed": 0})


def window(size, **changes):
    return asked("window", options={"window": size}, **changes)


def test_every_answer_is_the_value_that_stood_beside_the_key():
    keys, values, answers = (one.tolist() for one in drawn())
    pairs = [dict(zip(row[:12], held[:12], strict=True)) for row, held in zip(keys, values, strict=True)]
    found = [[known[key] for key in row[-5:]] for known, row in zip(pairs, keys, strict=True)]
    assert found == answers and all(len(known) == TASK.pairs for known in pairs)


def test_every_value_comes_equally_often_and_what_is_no_pair_holds_none():
    keys, values, _ = drawn()
    assert torch.equal(values[:, :12].sort().values, torch.arange(4).repeat_interleave(3).expand(3, 12))
    assert (values[:, 12:] == TASK.classes).all() and (keys[:, 12:16] == TASK.keys).all()


def test_a_batch_depends_on_its_numbers_and_on_nothing_else():
    assert all(map(torch.equal, drawn(number=5), drawn(number=5)))
    others = [drawn(number=6), drawn(number=5, seed=1), drawn(number=5, stream=TESTED)]
    assert not any(torch.equal(drawn(number=5).keys, other.keys) for other in others)


@pytest.mark.parametrize("causal", [False, True])
def test_all_backends_begin_with_the_same_weights_and_so_the_same_q_k_v(causal):
    keys, values, _ = drawn()
    cases = (asked(), window(3), features())
    models = [learner(TASK, replace(one, causal=causal), one.backend) for one in cases]
    # A backend that takes numbers from the generator while it is built.
    drawing = replace(
        MEAN.target, builder=lambda *given: torch.rand(3) is None or MEAN.target.builder(*given)
    )
    models.append(learner(TASK, replace(asked(MEAN.backend), causal=causal), drawing))
    exact, *others = [model.state_dict() for model in models]
    assert all(torch.equal(other[name], weight) for other in others for name, weight in exact.items())
    seen = []
    for model in models:
        model.backend.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
        model(keys, values)
    assert all(torch.equal(*pair) for inputs in seen[1:] for pair in zip(seen[0], inputs, strict=True))


def test_another_seed_is_another_draw_of_the_weights_and_of_the_features():
    one, other = (learner(TASK, features(seed), "performer-positive") for seed in (0, 1))
    assert not torch.equal(one.guess.weight, other.guess.weight)
    buffers = [dict(model.backend.named_buffers())["core.features.projection"] for model in (one, other)]
    assert not torch.equal(*buffers)


def test_a_query_begins_nearest_to_its_own_key():
    of_queries, of_keys, of_values = learner(TASK, asked(), "exact").block.attention.in_proj_weight.chunk(3)
    assert torch.equal(of_queries, of_keys) and not torch.equal(of_keys, of_values)


def changed(model, change):
    """How far the guesses move where the pairs hold other values, with weights that nobody chose."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight))
    keys, values, _ = drawn()
    with torch.no_grad():
        return float(
            (model(keys, change(values)) - model(keys, values)).abs().max() / model(keys, values).abs().max()
        )


def rotated(values):
    """The same values, each at another key."""
    return torch.cat([values[:, :12].roll(1, dims=1), values[:, 12:]], dim=1)


@pytest.mark.parametrize("causal", [False, True])
def test_the_mean_of_the_values_tells_nothing_of_what_belongs_together(causal):
    # Rounding of float32, and the norms' ε beside a variance of 1; what looks keys up moves by far more.
    mean = replace(asked(MEAN.backend), causal=causal)
    assert changed(learner(TASK, mean, MEAN.target), rotated) < 1e-3
    assert changed(learner(TASK, replace(asked(), causal=causal), "exact"), rotated) > 0.05


@pytest.mark.parametrize("causal", [False, True])
def test_the_control_window_sees_no_pair_and_a_wider_one_does(causal):
    wider = TASK.gap + 2 if causal else 2 * TASK.gap + 3
    own = learner(TASK, window(TASK.blind_window(causal=causal), causal=causal), "window")
    assert changed(own, rotated) == 0
    assert changed(learner(TASK, window(wider, causal=causal), "window"), rotated) > 0


@pytest.mark.parametrize(
    ("name", "options", "numbers"),
    [
        ("exact", {}, 2 * 8 * TASK.tokens),
        ("linformer", {"rank": 3}, 2 * 8 * 3),
        ("performer-positive", {"num_features": 6}, 6 * (8 + 1)),
        ("performer-full", {"num_features": 6}, 6 * (8 + 1)),
        ("linear-elu", {}, 8 * (8 + 1)),
        ("window", {"window": 1}, 2 * 8),
    ],
)
def test_floats_read_are_those_of_keys_and_values_or_of_the_state(name, options, numbers):
    built = ea.build(name, head_dim=8, num_heads=2, max_tokens=TASK.tokens, **options)
    assert floats_read(built, asked()) == numbers
