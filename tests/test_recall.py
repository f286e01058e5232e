"""Associative recall: a task that only what can look keys up learns, and the same terms for everybody."""

import json
from dataclasses import replace

import pytest
import torch
from made_records import case
from scipy import stats

import efficient_attn as ea
from efficient_attn.errors import DtypeError
from efficient_attn.runner.records import Record, line, parse
from efficient_attn.studies.recall import measure as recall_training
from efficient_attn.studies.recall.analysis import accuracy_of, contests
from efficient_attn.studies.recall.measure import MEAN, floats_read, learner
from efficient_attn.studies.recall.task import LEARNED, TESTED, Course, Task
from efficient_attn.studies.recall.view import sentences as recall_sentences
from efficient_attn.studies.recall.view import tables as recall_tables
from efficient_attn.studies.results import Results, read

TASK = Task(pairs=12, classes=4, queries=5, gap=4)
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


def drawn(*, seed=0, stream=LEARNED, number=0):
    return TASK.draw(3, seed=seed, stream=stream, number=number)


def asked(backend="exact", **changes):
    given = {"num_heads": 2, "head_dim": 8, "threads": 1, **changes}
    return case(
        "recall", backend, TASK.tokens, inputs=Course(task=TASK, steps=1, batch=3, rate=1).name, **given
    )


def features(seed=0):
    return asked("performer-positive", seed=seed, options={"num_features": 6, "seed": 0})


def window(size, **changes):
    return asked("window", options={"window": size}, **changes)


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
MEAN_OF_V = learned("mean of V", (0.25, 0.24, 0.26), 0.5, floats_read=8)
BLIND = learned("window(window=9)", (0.26, 0.25, 0.24), 0.9)
ALL = [
    *EXACT,
    *MEAN_OF_V,
    *BLIND,
    *learned("rank(num_features=4)", (0.5, 0.4, 0.6), 0.2),
    *learned("rank(num_features=8)", (0.9, 0.91, 0.92), 0.1),
    *learned("late", (0.995, 0.995, 0.995), 0.7),
]


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


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pairs": 63}, "pairs=63 is no multiple of classes=16"),
        ({"pairs": 8}, "pairs=8 is no multiple of classes=16"),
        ({"classes": 1}, "classes is at least 2, not 1"),
        ({"queries": 65}, "queries=65 is more than pairs=64"),
        ({"pairs": 0}, "pairs is at least 1, not 0"),
        ({"gap": -1}, "gap is at least 0, not -1"),
        ({"steps": 0}, "steps is at least 1, not 0"),
        ({"learning_rate": float("nan")}, "learning_rate is a finite number above 0"),
        ({"seeds": 0}, "seeds is at least 1, not 0"),
        ({"sizes": "many"}, "sizes cannot be 'many'"),
        ({"sizes": "1.5"}, "sizes cannot be '1.5'"),
        ({"backends": ["windw"]}, "Did you mean 'window'"),
        ({"options": {"window": {"window": [4]}}, "backends": ["window"]}, "window=4 has no middle"),
        ({"resume": True}, "resume needs out"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(sizes, message):
    with pytest.raises(ea.AttentionError, match=message) as told:
        ea.recall(**sizes)
    assert "\n" not in str(told.value)


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


@pytest.fixture
def two_threads():
    """Not the one thread that the runs here ask for."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_run_is_the_same_again_and_leaves_the_generator_and_the_threads_alone(two_threads):
    state = torch.get_rng_state()
    runs = [ea.recall(NAMES, **TINY) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == 2
    kept = [[(r.accuracy, r.output_relative_error, r.answers) for r in run.records] for run in runs]
    # Exact attention, two controls and the features, of two seeds.
    assert kept[0] == kept[1] and len(kept[0]) == 8
    assert {record.status for record in runs[0].records} == {"ok"}


def test_sizes_beyond_the_sequence_are_left_out():
    results = ea.recall(["window", "performer-positive"], **TINY | {"sizes": (8, 32), "seeds": 1, "steps": 1})
    labels = [record.case.label for record in results.records]
    # A window that is not causal is odd: at size 8 it is the control.
    assert labels[2:] == [
        "window(window=9)",
        "performer-positive(num_features=8)",
        "performer-positive(num_features=32)",
    ]


def test_records_hold_directions_and_the_bytes_of_parameters_and_state():
    causal = ea.recall(["performer-trig"], **TINY | {"seeds": 1, "causal": True})
    (found,) = (record for record in causal.records if record.case.backend == "performer-trig")
    # Four features are two directions of eight entries; a state has a sum for each feature and value.
    assert found.num_directions == 2 and found.parameter_bytes >= 4 * 2 * 8
    assert found.state_bytes >= 4 * 4 * 8 * found.case.num_heads
    exact = next(record for record in causal.records if record.case.backend == "exact")
    assert exact.num_directions is None and exact.parameter_bytes == 0
    both_ways = ea.recall(["performer-trig"], **TINY | {"seeds": 1}).records
    assert {record.state_bytes for record in both_ways} == {None}


def test_an_interrupted_run_keeps_what_was_trained_and_goes_on_there(tmp_path, monkeypatch):
    begun = []

    def measure(entry, target, course):
        begun.append(entry.label)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return Record(case=entry, accuracy=0.5, answers=4, chance=0.25)

    monkeypatch.setattr(recall_training, "measure", measure)
    cut = ea.recall(NAMES, **TINY, out=tmp_path)
    assert cut.interrupted and len(read(tmp_path).records) == 2
    whole = ea.recall(NAMES, **TINY, out=tmp_path, resume=True)
    assert not whole.interrupted and len(read(tmp_path).records) == 8 and len(begun) == 3 + 6
    with pytest.raises(ea.DataError, match="holds records of another run"):
        ea.recall(NAMES, **TINY, out=tmp_path)


def test_what_a_backend_raises_is_its_result_and_ends_nothing_else():
    def broken(q, k, v):
        raise RuntimeError("it broke here")

    results = ea.recall([broken], **TINY | {"seeds": 1})
    assert [record.status for record in results.records] == ["ok", "ok", "ok", "error"]
    assert "it broke here" in results.tables()[0].notes[-1]


@pytest.mark.parametrize(
    ("factor", "reason"), [(float("inf"), "entries of the output are not finite"), (1e30, "the loss was")]
)
def test_an_output_or_a_loss_that_is_not_finite_is_an_error_and_no_accuracy(factor, reason):
    results = ea.recall([lambda q, k, v: v * factor], **TINY | {"seeds": 1})
    last = parse(line(results.records[-1]).encode(), "here")
    assert last.status == "error" and last.accuracy is None and reason in last.reason


@pytest.mark.parametrize("answers", [8, 100, pytest.param(9600, marks=pytest.mark.slow)])
def test_a_control_is_at_chance_where_wilsons_interval_holds_it(answers):
    for right in range(answers + 1):
        row = contests([replace(EXACT[0], accuracy=right / answers, answers=answers)])[0].rows[0]
        known = stats.binomtest(right, answers).proportion_ci(0.999, method="wilson")
        assert row.at_chance == (known.low <= 0.25 <= known.high), right


@pytest.mark.parametrize("seeds", [1, 3, 5])
def test_few_seeds_have_a_range_and_no_interval(seeds):
    found = accuracy_of([0.2, 0.9, 0.5, 0.6, 0.7][:seeds])
    assert (found.low, found.high) == (0.2, 0.2 if seeds == 1 else 0.9)


@pytest.mark.parametrize(("learned", "seeds"), [(0, 6), (6, 6), (4, 6), (7, 10)])
def test_seeds_that_get_all_or_nothing_have_the_interval_of_clopper_and_pearson(learned, seeds):
    found = accuracy_of([1.0] * learned + [0.0] * (seeds - learned))
    known = stats.binomtest(learned, seeds).proportion_ci(method="exact")
    assert found.mean == learned / seeds
    # Either edge is a quantile of 20 000 weightings, whose standard error is √(p(1 − p)/20 000) / density.
    laws = (stats.beta(learned, seeds - learned + 1), stats.beta(learned + 1, seeds - learned))
    for edge, true, law in zip(found[1:], (known.low, known.high), laws, strict=True):
        certain = true in (0, 1)
        assert edge == pytest.approx(
            true, abs=1e-9 if certain else 4.5 * (0.025 * 0.975 / 20_000) ** 0.5 / law.pdf(true)
        )


def test_the_table_has_the_most_accurate_first_beside_the_untrained_error():
    (table,) = recall_tables(ALL)
    shown = {row[0]: row[2] for row in table.rows}
    assert [row[0] for row in table.rows][:3] == ["exact", "late", "rank(num_features=8)"]
    assert (shown["late"], shown["rank(num_features=8)"]) == ("0.7", "0.1")


def test_sentences_tell_exact_controls_and_who_learned():
    exact, controls, reached = recall_sentences(ALL)
    assert "exact attention is right in 0.997, seeds " in exact and exact.endswith("a guess is in 0.25.")
    assert controls.startswith("At chance, as controls must be") and "window(window=9)" in controls
    assert reached.endswith("the fewest numbers read first: late (64 numbers).")


def test_a_control_that_is_not_at_chance_is_said():
    told = recall_sentences([*EXACT, *learned("mean of V", (0.5, 0.5, 0.5))])
    assert "Trust none of it: mean of V" in told[1]


def test_what_was_trained_in_another_way_is_never_in_one_table():
    other = [replace(r, case=replace(r.case, causal=True)) for r in ALL]
    assert len(recall_tables([*ALL, *other])) == 2


def test_the_figure_has_an_accuracy_with_its_interval_for_each_size(tmp_path):
    results = Results(ALL)
    axes = results.plot().figure.axes
    lines = {line.get_label(): line for line in axes[0].containers}
    assert set(lines) == {"exact", "uniform-attention baseline", "window(window=9)", "rank", "late"}
    assert lines["rank"].lines[0].get_ydata().tolist() == pytest.approx([0.5, 0.91])
    results.save(tmp_path)
    assert not results.notes and "Recall after training" in (tmp_path / "report.html").read_text()
    assert {"recall.png", "summary.csv"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
def test_exact_attention_learns_to_look_keys_up_and_the_controls_never_do():
    small = {"pairs": 16, "classes": 4, "queries": 8, "gap": 4, "seeds": 2, "steps": 300}
    (one,) = contests(ea.recall(["exact"], **small, sizes=(8,), threads=1).records)
    assert not one.exact.at_chance and one.exact.accuracy.mean >= 0.99
    assert len(one.controls) == 2 and all(row.at_chance for row in one.controls)


def test_records_that_name_no_gap_have_no_blind_window():
    strange = [replace(r, case=replace(r.case, inputs="recall(gap=9999999999999999)")) for r in BLIND]
    (one,) = contests(strange)
    assert one.controls == () and json.loads(line(strange[0]))["accuracy"] == 0.26


def test_a_number_of_another_kind_is_refused():
    with pytest.raises(DtypeError, match="steps is a whole number"):
        ea.recall(steps=1.5)
