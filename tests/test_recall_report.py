"""The analysis of associative recall: intervals, controls at chance, tables, sentences and the figure."""

import json

import pytest
from recall_cases import asked
from scipy import stats

from efficient_attn.measure.record import Record, replace
from efficient_attn.measure.records import line
from efficient_attn.studies.recall.view import accuracy_of, contests
from efficient_attn.studies.recall.view import sentences as recall_sentences
from efficient_attn.studies.recall.view import tables as recall_tables


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
UNIFORM = learned("uniform attention", (0.25, 0.24, 0.26), 0.5, floats_read=8)
BLIND = learned("window(window=9)", (0.26, 0.25, 0.24), 0.9)
ALL = [
    *EXACT,
    *UNIFORM,
    *BLIND,
    *learned("rank(num_features=4)", (0.5, 0.4, 0.6), 0.2),
    *learned("rank(num_features=8)", (0.9, 0.91, 0.92), 0.1),
    *learned("late", (0.995, 0.995, 0.995), 0.7),
]


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


def test_a_control_that_is_not_at_chance_is_said():
    told = recall_sentences([*EXACT, *learned("uniform attention", (0.5, 0.5, 0.5))])
    assert "Trust none of it: uniform attention" in told[1]


def test_what_was_trained_in_another_way_is_never_in_one_table():
    other = [replace(r, case=replace(r.case, causal=True)) for r in ALL]
    assert len(recall_tables([*ALL, *other])) == 2


def test_records_that_name_no_gap_have_no_blind_window():
    strange = [replace(r, case=replace(r.case, inputs="recall(gap=9999999999999999)")) for r in BLIND]
    (one,) = contests(strange)
    assert one.controls == () and json.loads(line(strange[0]))["accuracy"] == 0.26
