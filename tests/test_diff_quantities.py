"""Every quantity of every study is compared by `diff`, with the test that fits its scatter."""

import json
from dataclasses import replace

import numpy as np
import pytest

import efficient_attn as ea
from efficient_attn.errors import UnknownNameError
from efficient_attn.runner.quantity import CONDITIONS, FIELDS, KINDS, QUANTITIES
from efficient_attn.runner.record import CASE_FIELDS, Case, Record
from efficient_attn.runner.records import line
from efficient_attn.studies import studies
from efficient_attn.studies.diff import diff

studies()

# A kind of record that holds a quantity; all others are held by records of errors.
KIND_OF = {
    "time_s": "time",
    "device_time_s": "time",
    "accuracy": "recall",
}
NOISE = np.exp(0.01 * np.random.default_rng(0).standard_normal((2, 16)))


def case(kind, seed=0, **fields):
    about = {"num_heads": 2, "head_dim": 8, "tokens": 64, "dtype": "float32", "device": "cpu", "threads": 1}
    return Case(kind=kind, backend="b", label="b", seed=seed, **{**about, **fields})


def record(kind, seed=0, **measured):
    return Record(case=case(kind, seed), **measured)


def results(*records):
    return ea.Results(records)


def measured(quantity, value, noise):
    """Records of a run in which a quantity is about `value`, with repetitions where it has any."""
    kind, whole = KIND_OF.get(quantity.name, "error"), quantity.name in ("texts", "answers")
    if quantity.scatter == "rounds":
        return [record(kind, **{quantity.samples: tuple(value * noise)}, round_sizes=(4,) * 4)]
    if quantity.scatter == "seeds":
        values = [value * one for one in noise[:4]]
        return [record(kind, seed, **{quantity.field: one}) for seed, one in enumerate(values)]
    if quantity.type == "text":
        return [record(kind, **{quantity.field: f"about {value}"})]
    value = round(value) if whole else value
    made = {quantity.field: (3 * value, value) if quantity.entry else value}
    if quantity.samples:
        made[quantity.samples] = tuple(value * noise)
    return [record(kind, **made)]


def test_every_field_of_a_record_is_compared_or_says_its_part_in_the_comparison():
    values = QUANTITIES.values()
    compared = {one.field for one in values} | {one.samples for one in values} - {None}
    assert set(FIELDS) == compared | set(CONDITIONS)
    # No field is compared and excused, no field is one of the case, and the excuses are these alone.
    assert not compared & {*CONDITIONS} and not FIELDS.keys() & {*CASE_FIELDS, "status", "reason"}
    assert sorted(CONDITIONS) == [
        "attention_relative_error_high",
        "attention_relative_error_low",
        "audited_layers",
        "copy_bytes_per_s",
        "kernels",
        "matmul_flops_per_s",
        "memory_clock_hz",
        "memory_method",
        "power_state",
        "power_w",
        "round_sizes",
        "sm_clock_hz",
        "temperature_c",
        "throttle_reasons",
        "waited_s",
    ]
    assert not {*QUANTITIES, *CONDITIONS} & set(KINDS)


@pytest.mark.parametrize("name", QUANTITIES)
def test_a_worse_number_of_every_quantity_is_called_worse_and_fails_where_it_was_asked_for(name):
    quantity = QUANTITIES[name]
    small, large = (measured(quantity, value, noise) for value, noise in zip((2.0, 4.0), NOISE, strict=True))
    old, new = (small, large) if quantity.better != "more" else (large, small)
    asked = {name: 0.1}
    found = diff(results(*old), results(*new), fail_on=asked)
    assert [one.quantity for one in found.regressions] == [name]
    back = diff(results(*new), results(*old), fail_on=asked)
    verdicts = {one.quantity: one.verdict for one in back.comparison.changes}
    if quantity.better is None:
        assert verdicts[name] == "changed"
    else:
        assert verdicts[name] == "improvement" and not back.regressions
        # It fails without being asked for too, by its own threshold and by its kind.
        assert name in [one.quantity for one in diff(results(*old), results(*new)).regressions]
        kind = old[0].case.kind
        assert name in [
            o.quantity for o in diff(results(*old), results(*new), fail_on={kind: 0.1}).regressions
        ]
    assert not diff(results(*old), results(*old), fail_on=asked).regressions


def test_a_name_that_nobody_compares_is_refused_with_the_nearest_one():
    empty = results()
    for wrong, right in (
        ("acuracy", "accuracy"),
        ("perplexty", "perplexity"),
        ("tme", "time"),
    ):
        with pytest.raises(UnknownNameError, match=f"Did you mean '{right}'"):
            diff(empty, empty, fail_on={wrong: 0.1})


def test_a_collapse_of_recall_is_a_regression(tmp_path):
    """One record, as short as it can be."""
    folders = []
    for name, accuracy in (("old", 0.99), ("new", 0.10)):
        short = record("recall", accuracy=accuracy, answers=2048, chance=1 / 16)
        (tmp_path / name).mkdir()
        (tmp_path / name / "records.jsonl").write_text(f"{line(short)}\n")
        folders.append(tmp_path / name)
    found = diff(*folders)
    assert {one.quantity for one in found.regressions} == {"accuracy"}
    assert json.loads(json.dumps(found.as_dict()))["regressions"]


def accuracies(*values, answers=2048):
    return results(*(record("recall", seed, accuracy=v, answers=answers) for seed, v in enumerate(values)))


def verdict(found, quantity):
    (one,) = [change for change in found.comparison.changes if change.quantity == quantity]
    return one.verdict


def test_the_unit_of_recall_is_the_seed_and_not_the_answer():
    old, new = accuracies(0.99, 0.98, 0.97), accuracies(0.11, 0.10, 0.09)
    assert verdict(diff(old, new), "accuracy") == "regression"
    assert verdict(diff(new, old), "accuracy") == "improvement"
    # A training that learns from one seed in three, whatever the number of answers.
    old, new = accuracies(0.99, 0.1, 0.99, answers=10**6), accuracies(0.1, 0.99, 0.1, answers=10**6)
    assert verdict(diff(old, new), "accuracy") == "unclear"


def test_seeds_of_one_backend_that_learn_or_fail_make_all_verdicts_careful():
    """Three that learned and three that failed may be chance where other backends show such a chance."""

    def side(values, other):
        others = [
            replace(r, case=replace(r.case, backend="c", label="c")) for r in accuracies(*other).records
        ]
        return results(*accuracies(*values).records, *others)

    old, new = side((0.99, 0.98, 0.97), (0.1, 0.99, 0.1)), side((0.1, 0.11, 0.1), (0.99, 0.1, 0.99))
    found = [one.verdict for one in diff(old, new).comparison.changes if one.quantity == "accuracy"]
    assert found == ["unclear", "unclear"]


def swapped(draws, texts):
    return results(
        record("swap", perplexity=float(np.mean(draws)), perplexity_draws=tuple(draws), texts=texts)
    )


def test_texts_are_the_same_in_both_runs_and_only_seeds_are_chance():
    texts = np.array([5.0, 20.0, 80.0])
    # One seed: three texts that are all 10 % worse, though they differ by more than that from each other.
    assert verdict(diff(swapped(texts, 3), swapped(1.1 * texts, 3)), "perplexity") == "regression"
    seeds = np.repeat(texts, 2) * np.tile([0.8, 1.2], 3)
    assert verdict(diff(swapped(seeds, 3), swapped(1.1 * seeds, 3)), "perplexity") == "unclear"


def test_rounding_of_exact_attention_is_no_regression():
    small, large = (
        record("error", output_relative_error=one * 1e-7, output_mse=one * 1e-15) for one in (1, 3)
    )
    assert not diff(results(small), results(large)).regressions
    assert not diff(results(small), results(large), fail_on={"output_relative_error": 0.0}).regressions


def test_of_several_entries_the_worst_is_compared():
    old, new = (
        record("swap", attention_relative_error=heads) for heads in ((0.1, 0.2, 0.3), (0.1, 0.4, 0.1))
    )
    (change,) = diff(results(old), results(new)).regressions
    assert (change.old, change.new) == (0.3, 0.4)


def test_what_a_backend_was_calibrated_on_is_reported_as_changed():
    old, new = (record("error", output_mse=0.1, calibrated_on=text) for text in (None, "a text"))
    found = diff(results(old), results(new))
    assert verdict(found, "calibrated_on") == "changed" and not found.regressions
    assert "None → a text" in str(found.tables()[0].notes)
