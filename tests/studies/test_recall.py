"""Associative recall: the draws of its task, equal models, runs and their analysis."""

import pytest
import torch
from synthetic_records import case

import efficient_attn as ea
from efficient_attn.measure.record import Record, line, parse, replace
from efficient_attn.studies.recall.course import CLASSES, GAP, LEARNED, QUERIES, TESTED, Course
from efficient_attn.studies.recall.measure import MEAN, floats_read, learner
from efficient_attn.studies.recall.view import contests

COURSE = Course(16, 1)


def asked(backend="exact", **changes):
    settings = {"num_heads": 2, "head_dim": 8, "threads": 1, **changes}
    return case("recall", backend, COURSE.tokens, inputs=COURSE.name, **settings)


def drawn(*, seed=0, stream=LEARNED, number=0):
    return COURSE.draw(3, seed=seed, stream=stream, number=number)


def features(seed=0):
    return asked("performer-positive", seed=seed, options={"num_features": 6, "seed": 0})


def window(size, **changes):
    return asked("window", options={"window": size}, **changes)


def test_every_answer_is_the_value_beside_its_key_and_every_value_comes_equally_often():
    keys, values, answers = drawn()
    for row, beside, told in zip(keys.tolist(), values.tolist(), answers.tolist(), strict=True):
        pairs = dict(zip(row[:16], beside[:16], strict=True))
        assert [pairs[key] for key in row[-QUERIES:]] == told and len(pairs) == COURSE.pairs
    assert torch.equal(values[:, :16].sort().values, torch.arange(CLASSES).expand(3, CLASSES))
    assert (values[:, 16:] == CLASSES).all() and (keys[:, 16 : 16 + GAP] == COURSE.keys).all()


def test_a_batch_depends_on_its_numbers_and_on_nothing_else():
    assert all(map(torch.equal, drawn(number=5), drawn(number=5)))
    others = [drawn(number=6), drawn(number=5, seed=1), drawn(number=5, stream=TESTED)]
    assert not any(torch.equal(drawn(number=5)[0], keys) for keys, *_ in others)


@pytest.mark.parametrize("causal", [False, True])
def test_all_backends_begin_with_the_same_weights_and_so_the_same_q_k_v(causal):
    keys, values, _ = drawn()
    cases = (asked(), window(3), features())
    models = [learner(COURSE, replace(x, causal=causal), x.backend) for x in cases]
    # A backend that takes numbers from the generator while it is built.
    drawing = replace(MEAN.target, builder=lambda *x: torch.rand(3) is None or MEAN.target.builder(*x))
    models.append(learner(COURSE, replace(asked(MEAN.backend), causal=causal), drawing))
    exact, *others = [model.state_dict() for model in models]
    assert all(torch.equal(other[name], weight) for other in others for name, weight in exact.items())
    seen = []
    for model in models:
        model.backend.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
        model(keys, values)
    assert all(torch.equal(*pair) for inputs in seen[1:] for pair in zip(seen[0], inputs, strict=True))


def changed(model):
    """How far the guesses move where each value stands at another key, with weights that nobody chose."""
    torch.manual_seed(0)
    keys, values, _ = drawn()
    rotated = torch.cat([values[:, :16].roll(1, dims=1), values[:, 16:]], dim=1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight))
        guesses = model(keys, values)
        return float((model(keys, rotated) - guesses).abs().max() / guesses.abs().max())


@pytest.mark.parametrize("causal", [False, True])
def test_what_looks_no_keys_up_cannot_tell_which_value_belongs_to_a_key(causal):
    # Rounding of float32, and the norms' ε beside a variance of 1; what looks keys up moves by far more.
    mean = replace(asked(MEAN.backend), causal=causal)
    assert changed(learner(COURSE, mean, MEAN.target)) < 1e-3
    assert changed(learner(COURSE, replace(asked(), causal=causal), "exact")) > 0.05
    # A window within the gap sees no pair.
    blind = GAP + 1 if causal else 2 * GAP + 1
    assert changed(learner(COURSE, window(blind, causal=causal), "window")) == 0
    assert changed(learner(COURSE, window(blind + 2, causal=causal), "window")) > 0


@pytest.mark.parametrize(
    ("name", "options", "numbers"),
    [
        ("exact", {}, 2 * 8 * COURSE.tokens),
        ("linformer", {"rank": 3}, 2 * 8 * 3),
        ("performer-positive", {"num_features": 6}, 6 * (8 + 1)),
        ("window", {"window": 1}, 2 * 8),
    ],
)
def test_floats_read_are_those_of_keys_and_values_or_of_the_state(name, options, numbers):
    built = ea.build(name, head_dim=8, num_heads=2, max_tokens=COURSE.tokens, **options)
    assert floats_read(built, asked()) == numbers


TINY = {"pairs": 16, "steps": 2, "seeds": 2, "sizes": (4,), "threads": 1}
NAMES = ["exact", "performer-positive"]


def test_a_run_is_the_same_again_and_leaves_the_generator_alone():
    state = torch.get_rng_state()
    runs = [ea.recall(NAMES, **TINY) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    accuracies = [[(r.accuracy, r.answers) for r in run.records] for run in runs]
    # Exact and uniform attention and the features, of two seeds.
    assert accuracies[0] == accuracies[1] and len(accuracies[0]) == 6
    assert {record.status for record in runs[0].records} == {"ok"}


@pytest.mark.parametrize(
    ("factor", "reason"), [(float("inf"), "entries of the output are not finite"), (1e30, "the loss was")]
)
def test_an_output_or_a_loss_that_is_not_finite_is_an_error_and_no_accuracy(factor, reason):
    results = ea.recall([lambda q, k, v: v * factor], **TINY | {"seeds": 1})
    last = parse(line(results.records[-1]).encode(), "here")
    assert last.status == "error" and last.accuracy is None and reason in last.reason


@pytest.mark.slow
def test_exact_attention_learns_to_look_keys_up_and_uniform_attention_never_does():
    results = ea.recall(["exact"], pairs=16, seeds=2, steps=300, sizes=(8,), threads=1)
    ((exact, uniform),) = contests(results.records)
    assert exact.accuracy >= 0.99
    # Four standard errors of 4096 answers.
    assert abs(uniform.accuracy - 1 / CLASSES) < 4 * (1 / CLASSES * (1 - 1 / CLASSES) / 4096) ** 0.5


def learned(label, accuracies, **changes):
    """The records of one backend, a seed for each accuracy."""
    measured = {"times_s": (0.001,), "answers": 1000, "chance": 0.25, "floats_read": 64, **changes}
    cases = [replace(asked(label, seed=seed), label=label) for seed in range(len(accuracies))]
    return [Record(case=x, accuracy=share, **measured) for x, share in zip(cases, accuracies, strict=True)]


EXACT = learned("exact", (0.99, 1.0, 1.0), floats_read=336)


def test_an_accuracy_is_the_mean_over_seeds_with_their_range():
    for accuracies, shown in (((0.2,), "0.200"), ((0.2, 0.9, 0.5), "0.533\t0.200 to 0.900")):
        ((row,),) = contests(learned("exact", accuracies))
        assert row.text == shown


def test_the_conclusion_names_what_learned_the_task():
    rows = [*EXACT, *learned("window", (0.5,)), *learned("uniform attention", (0.25,)), *learned("f", (0.6,))]
    (sentence,) = ea.Results(rows, environment={"study": "recall"}).sentences()
    assert sentence == "Backends with accuracy ≥ 0.99, smallest state first: exact (state 336 floats)."


def test_what_was_trained_in_another_way_is_never_in_one_table():
    causal = [replace(r, case=replace(r.case, causal=True)) for r in EXACT]
    assert len(ea.Results([*EXACT, *causal], environment={"study": "recall"}).tables()) == 2
