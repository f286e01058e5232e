"""Associative recall: the draws of its task, equal models, runs and their analysis."""

import json

import pytest
import torch
from made_records import case
from scipy import stats

import efficient_attn as ea
from efficient_attn.measure.record import Record, line, parse, replace
from efficient_attn.studies.recall.measure import MEAN, floats_read, learner
from efficient_attn.studies.recall.plan import LEARNED, TESTED, Course, Task
from efficient_attn.studies.recall.view import contests, show_accuracy
from efficient_attn.studies.recall.view import sentences as recall_sentences
from efficient_attn.studies.recall.view import tables as recall_tables

TASK = Task(pairs=12, classes=4, queries=5, gap=4)


def asked(backend="exact", **changes):
    given = {"num_heads": 2, "head_dim": 8, "threads": 1, **changes}
    return case(
        "recall", backend, TASK.tokens, inputs=Course(task=TASK, steps=1, batch=3, rate=1).name, **given
    )


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


def changed(model):
    """How far the guesses move where each value stands at another key, with weights that nobody chose."""
    torch.manual_seed(0)
    keys, values, _ = drawn()
    rotated = torch.cat([values[:, :12].roll(1, dims=1), values[:, 12:]], dim=1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight))
        guesses = model(keys, values)
        return float((model(keys, rotated) - guesses).abs().max() / guesses.abs().max())


@pytest.mark.parametrize("causal", [False, True])
def test_the_controls_cannot_tell_which_value_belongs_to_a_key(causal):
    # Rounding of float32, and the norms' ε beside a variance of 1; what looks keys up moves by far more.
    mean = replace(asked(MEAN.backend), causal=causal)
    assert changed(learner(TASK, mean, MEAN.target)) < 1e-3
    assert changed(learner(TASK, replace(asked(), causal=causal), "exact")) > 0.05
    wider = TASK.gap + 2 if causal else 2 * TASK.gap + 3
    own = learner(TASK, window(TASK.blind_window(causal=causal), causal=causal), "window")
    assert changed(own) == 0
    assert changed(learner(TASK, window(wider, causal=causal), "window")) > 0


@pytest.mark.parametrize(
    ("name", "options", "numbers"),
    [
        ("exact", {}, 2 * 8 * TASK.tokens),
        ("linformer", {"rank": 3}, 2 * 8 * 3),
        ("performer-positive", {"num_features": 6}, 6 * (8 + 1)),
        ("window", {"window": 1}, 2 * 8),
    ],
)
def test_floats_read_are_those_of_keys_and_values_or_of_the_state(name, options, numbers):
    built = ea.build(name, head_dim=8, num_heads=2, max_tokens=TASK.tokens, **options)
    assert floats_read(built, asked()) == numbers


TINY = {
    "pairs": 8,
    "classes": 4,
    "queries": 4,
    "gap": 4,
    "steps": 2,
    "seeds": 2,
    "sizes": (4,),
    "batch": 2,
    "head_dim": 8,
    "threads": 1,
}
NAMES = ["exact", "performer-positive"]


def test_a_run_is_the_same_again_and_leaves_the_generator_alone():
    state = torch.get_rng_state()
    runs = [ea.recall(NAMES, **TINY) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    kept = [[(r.accuracy, r.output_relative_error, r.answers) for r in run.records] for run in runs]
    # Exact attention, two controls and the features, of two seeds.
    assert kept[0] == kept[1] and len(kept[0]) == 8
    assert {record.status for record in runs[0].records} == {"ok"}


@pytest.mark.parametrize(
    ("factor", "reason"), [(float("inf"), "entries of the output are not finite"), (1e30, "the loss was")]
)
def test_an_output_or_a_loss_that_is_not_finite_is_an_error_and_no_accuracy(factor, reason):
    results = ea.recall([lambda q, k, v: v * factor], **TINY | {"seeds": 1})
    last = parse(line(results.records[-1]).encode(), "here")
    assert last.status == "error" and last.accuracy is None and reason in last.reason


@pytest.mark.slow
def test_exact_attention_learns_to_look_keys_up_and_the_controls_never_do():
    small = {"pairs": 16, "classes": 4, "queries": 8, "gap": 4, "seeds": 2, "steps": 300}
    (one,) = contests(ea.recall(["exact"], **small, sizes=(8,), threads=1).records)
    assert not one.exact.at_chance and one.exact.accuracy >= 0.99
    assert len(one.controls) == 2 and all(row.at_chance for row in one.controls)


def learned(label, accuracies=(0.5, 0.52, 0.48), error=0.3, **changes):
    """The records of one backend, a seed for each accuracy."""
    backend = label.partition("(")[0]
    measured = {
        "times_s": (0.001, 0.002, 0.003),
        "output_relative_error": error,
        "answers": 1000,
        "chance": 0.25,
        "floats_read": 64,
        **changes,
    }
    options = {"window": 9} if label == "window(window=9)" else {"num_features": 8}
    made = enumerate(accuracies)
    return [
        Record(case=replace(asked(backend, seed=s, options=options), label=label), accuracy=one, **measured)
        for s, one in made
    ]


EXACT = learned("exact", (0.99, 1.0, 1.0), 1e-7, floats_read=336)
BLIND = learned("window(window=9)", (0.26, 0.25, 0.24), 0.9)


@pytest.mark.parametrize("answers", [8, 100])
def test_a_control_is_at_chance_where_wilsons_interval_holds_it(answers):
    for right in range(answers + 1):
        row = contests([replace(EXACT[0], accuracy=right / answers, answers=answers)])[0].rows[0]
        known = stats.binomtest(right, answers).proportion_ci(0.999, method="wilson")
        assert row.at_chance == (known.low <= 0.25 <= known.high), right


@pytest.mark.parametrize(("seeds", "shown"), [(1, "0.200"), (3, "0.533\t0.200 to 0.900")])
def test_an_accuracy_is_the_mean_over_seeds_with_their_range(seeds, shown):
    (contest,) = contests(learned("exact", (0.2, 0.9, 0.5)[:seeds]))
    assert show_accuracy(contest.rows[0]) == shown


def test_a_control_that_is_not_at_chance_is_said():
    told = recall_sentences([*EXACT, *learned("uniform attention", (0.5, 0.5, 0.5))])
    assert "controls above chance although blind to the pairs: uniform attention" in told[1]


def test_what_was_trained_in_another_way_is_never_in_one_table():
    made = [*EXACT, *BLIND]
    other = [replace(r, case=replace(r.case, causal=True)) for r in made]
    assert len(recall_tables([*made, *other])) == 2


def test_records_that_name_no_gap_have_no_blind_window():
    strange = [replace(r, case=replace(r.case, inputs="recall(gap=9999999999999999)")) for r in BLIND]
    (one,) = contests(strange)
    assert one.controls == () and json.loads(line(strange[0]))["accuracy"] == 0.26
