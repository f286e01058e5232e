"""The study `diff`: machines, kernels and software of both sides, thresholds, sentences and refusals."""

import json
import math

import numpy as np
import pytest
from made_records import case, costs, timed

import efficient_attn as ea
from efficient_attn.errors import DataError, OptionError, UnknownNameError
from efficient_attn.measure.quantities import CONDITIONS, FIELDS, KINDS, QUANTITIES
from efficient_attn.measure.record import Case, Record, replace
from efficient_attn.studies import studies

studies()

# A kind of record that holds a quantity; all others are held by records of errors.
KIND_OF = {"time_s": "time", "device_time_s": "time", "accuracy": "recall"}
NOISE = np.exp(0.01 * np.random.default_rng(0).standard_normal((2, 16)))
MEMORY = Record(case=case("memory", "b", 64), peak_bytes=1000, memory_method="profiler")
ONE_TIME = timed("b", 64, [1e-3] * 4)


def results(*records, **environment):
    return ea.Results(records, environment=environment)


def measured(quantity, value, noise):
    """Records of a run in which a quantity is about `value`, with repetitions where it has any."""
    kind, whole = KIND_OF.get(quantity.name, "error"), quantity.name in ("texts", "answers")

    def record(seed=0, **fields):
        return Record(case=case(kind, "b", 64, seed=seed), **fields)

    if quantity.scatter == "rounds":
        return [record(**{quantity.samples: tuple(value * noise)}, round_sizes=(4,) * 4)]
    if quantity.scatter == "seeds":
        return [record(seed, **{quantity.field: value * noise[seed]}) for seed in range(4)]
    if quantity.type == "text":
        return [record(**{quantity.field: f"about {value}"})]
    value = round(value) if whole else value
    fields = {quantity.field: value}
    if quantity.samples:
        fields[quantity.samples] = tuple(value * noise)
    return [record(**fields)]


def test_every_field_of_a_record_is_compared_or_says_its_part_in_the_comparison():
    quantities = QUANTITIES.values()
    compared = {quantity.field for quantity in quantities} | {q.samples for q in quantities} - {None}
    assert set(FIELDS) == compared | set(CONDITIONS)
    # No field is compared and excused, no field is part of the case, and the excuses are these alone.
    assert not compared & {*CONDITIONS} and not FIELDS.keys() & {*Case.__struct_fields__, "status", "reason"}
    assert " ".join(sorted(CONDITIONS)) == (
        "compared_queries copy_bytes_per_s kernels matmul_flops_per_s memory_method "
        "round_sizes sm_clock_hz throttle_reasons waited_s"
    )
    assert not {*QUANTITIES, *CONDITIONS} & set(KINDS)


@pytest.mark.parametrize("name", QUANTITIES)
def test_a_worse_number_of_every_quantity_is_a_regression_by_its_own_threshold_and_by_its_kind(name):
    quantity = QUANTITIES[name]
    small, large = (measured(quantity, value, noise) for value, noise in zip((2.0, 4.0), NOISE, strict=True))
    old, new = (small, large) if quantity.better != "more" else (large, small)
    sides = results(*old), results(*new)
    assert [change.quantity for change in ea.diff(*sides, fail_on={name: 0.1}).regressions] == [name]
    back = ea.diff(*sides[::-1], fail_on={name: 0.1})
    verdicts = {change.quantity: change.verdict for change in back.comparison.changes}
    if quantity.better is None:
        assert verdicts[name] == "changed"
    else:
        assert verdicts[name] == "improvement" and not back.regressions
        for fail_on in (None, {old[0].case.kind: 0.1}):
            regressions = ea.diff(*sides, fail_on=fail_on).regressions
            assert name in [change.quantity for change in regressions]
    assert not ea.diff(sides[0], sides[0], fail_on={name: 0.1}).regressions


def test_only_the_kinds_that_were_named_fail_and_json_has_every_threshold():
    old = results(ONE_TIME, MEMORY)
    new = results(replace(ONE_TIME, times_s=(1.5e-3,) * 4), replace(MEMORY, peak_bytes=2000))
    assert {change.kind for change in ea.diff(old, new).regressions} == {"time", "memory"}
    named = ea.diff(old, new, fail_on={"time": 0.1, "accuracy": 0.2})
    assert {change.kind for change in named.regressions} == {"time"}
    assert not ea.diff(old, new, fail_on={"time": 1.0}).regressions
    text = json.loads(json.dumps(named.as_dict()))
    assert text["thresholds"]["accuracy"] == 0.2 and text["thresholds"]["peak_bytes"] == 0.0
    assert text["regressions"] and text["runs"] == [1, 1]


@pytest.mark.parametrize(
    ("sides", "fail_on", "error", "message"),
    [
        ((results(), results()), {"speed": 0.1}, UnknownNameError, "No quantity is called 'speed'"),
        ((results(), results()), {"acuracy": 0.1}, UnknownNameError, "Did you mean 'accuracy'"),
        ((results(), results()), {"tme": 0.1}, UnknownNameError, "Did you mean 'time'"),
        ((results(), results()), {"time": math.nan}, OptionError, "time is a share from 0 on"),
        (("nowhere", results()), None, DataError, "Cannot read records"),
        ((results(), []), None, OptionError, "new has no run; name at least one"),
    ],
)
def test_wrong_requests_are_refused(sides, fail_on, error, message):
    with pytest.raises(error, match=message):
        ea.diff(*sides, fail_on=fail_on)


GPU = {"name": "G", "memory_bytes": 2**30}
TORCH = {"version": "2.9"}


@pytest.mark.parametrize(
    ("old", "new", "warnings"),
    [
        ({"processor": "A"}, {"processor": "A"}, []),
        (
            {"processor": "A", "python": "3.11"},
            {"processor": "B", "python": "3.12"},
            ["ANOTHER MACHINE: processor was A, is B.", "python was 3.11, is 3.12"],
        ),
        (
            {"gpu": {**GPU, "driver_version": "570"}, "torch": TORCH},
            {"gpu": {**GPU, "driver_version": "580"}, "torch": TORCH},
            ["Other surroundings: gpu.driver_version was 570, is 580."],
        ),
        (
            {"gpu": GPU, "torch": TORCH},
            {"gpu": {**GPU, "name": "H"}, "torch": TORCH},
            ["ANOTHER MACHINE: gpu.name was G, is H."],
        ),
    ],
)
def test_a_change_of_machine_or_software_is_said(old, new, warnings):
    said = ea.diff(results(**old), results(**new)).warnings
    assert len(said) == len(warnings)
    assert all(part in text for part, text in zip(warnings, said, strict=True))


def test_other_kernels_of_the_same_case_are_said_and_unknown_kernels_are_not():
    def warnings(old, new):
        sides = [[results(replace(MEMORY, kernels=name), ONE_TIME) for name in names] for names in (old, new)]
        return ea.diff(*sides).warnings

    assert warnings(["cpu"], ["torch"]) == ["OTHER KERNELS in 1 cases: cpu then, torch now."]
    assert warnings(["cpu"], ["cpu"]) == warnings([None], ["torch"]) == warnings(["torch"], [None]) == []
    assert warnings(["cpu", "flex"], ["cpu"]) == ["OTHER KERNELS in 1 cases: cpu or flex then, cpu now."]


def test_the_sentences_say_the_unit_of_the_test_and_the_tables_what_changed():
    old = results(*costs())
    told = " ".join(ea.diff(old, old).sentences())
    assert "hold for independent rounds" in told and "diff OLD OLD -- NEW NEW" in told
    several = ea.diff([old, old], [old, old, old])
    assert several.as_dict()["runs"] == [2, 3]
    told = " ".join(several.sentences())
    assert "is the run: 2 old, 3 new" in told and "independent rounds" not in told
    error = Record(case=case("error", "b", 64), output_mse=0.1)
    calibrated = ea.diff(results(error), results(replace(error, calibrated_on="a text")))
    assert "None → a text" in str(calibrated.tables()[0].notes) and not calibrated.regressions
