"""Two runs compared: what is called a regression, how often wrongly, and how surely."""

import math
from dataclasses import replace

import numpy as np
import pytest
from made_records import compare

import efficient_attn as ea
from efficient_attn.errors import DataError, OptionError, UnknownNameError
from efficient_attn.runner.records import Case, Record
from efficient_attn.stats import significance
from efficient_attn.stats.scatter import round_means

# A default benchmark: six backends at five lengths.
BACKENDS, LENGTHS = 6, 5

# An A/A comparison may go wrong once in a hundred times; of 1000 so many are three standard deviations more.
RUNS = 1000
MOST_FALSE_ALARMS = 10 + 3 * math.sqrt(1000 * 0.01 * 0.99)


def case(number=0, kind="time", **fields):
    name = f"backend-{number % BACKENDS}"
    about = {"num_heads": 8, "head_dim": 64, "tokens": 256 << number // BACKENDS % 8, "seed": number // 48}
    setting = {"dtype": "float32", "device": "cpu", "threads": 2}
    return Case(**{"kind": kind, "backend": name, "label": name, **about, **setting, **fields})


def timed(generator, number=0, *, calls=20, cv=0.05, turn_share=0.0, turns=4, factor=1.0):
    """Calls of a lognormal law; calls of a turn have `turn_share` of the variance in common."""
    own = generator.standard_normal(calls)
    sizes = tuple(len(part) for part in np.array_split(own, turns))
    common = np.repeat(generator.standard_normal(turns), sizes)
    logs = cv * (math.sqrt(1 - turn_share) * own + math.sqrt(turn_share) * common)
    return Record(case=case(number), times_s=tuple(1e-3 * factor * np.exp(logs)), round_sizes=sizes)


def run(generator, slow=None, factor=1.1, **fields):
    return [
        timed(generator, number, factor=factor if number == slow else 1.0, **fields)
        for number in range(BACKENDS * LENGTHS)
    ]


def memory(**fields):
    return Record(case=case(kind="memory"), memory_method="profiler", **{"peak_bytes": 1000, **fields})


def errors(draws, **fields):
    about = case(kind="error", of="output", **fields)
    return Record(
        case=about, output_relative_error=float(np.mean(draws)), output_relative_error_draws=tuple(draws)
    )


def only(old, new, **options):
    (change,) = compare([old], [new], **options).changes
    return change


@pytest.mark.parametrize("calls", [4, 20])
def test_one_true_regression_is_the_only_one_found(calls):
    generator = np.random.default_rng(0)
    found = compare(run(generator, calls=calls), run(generator, slow=7, factor=1.5, calls=calls))
    assert [(one.name, one.tokens) for one in found.of("regression")] == [("backend-1", 512)]
    assert not found.of("improvement")
    (change,) = found.of("regression")
    assert change.low < 1.5 < change.high


def test_what_waiting_for_a_processor_can_explain_is_not_clear():
    generator = np.random.default_rng(0)
    old, new = timed(generator), timed(generator, factor=1.5)
    for share, verdict in ((0.2, "regression"), (0.5, "unclear")):
        held_up = replace(new, waited_s=share * sum(new.times_s))
        assert only(old, held_up).verdict == verdict
        assert only(held_up, old).verdict == verdict.replace("regression", "improvement")
        # What the faster run waited does not make the other one slower.
        assert only(replace(old, waited_s=held_up.waited_s), new).verdict == "regression"


def test_the_reverse_is_an_improvement():
    generator = np.random.default_rng(0)
    found = compare(run(generator, slow=7, factor=1.5), run(generator))
    assert len(found.of("improvement")) == 1 and not found.of("regression")


def test_copies_of_a_call_in_its_turn_tell_nothing_new():
    generator = np.random.default_rng(0)
    once = [timed(generator, calls=4, factor=factor) for factor in (1.0, 1.2)]
    often = [replace(one, times_s=tuple(np.repeat(one.times_s, 9)), round_sizes=(9,) * 4) for one in once]
    assert vars(only(*often)) == pytest.approx(vars(only(*once)))
    # In nine turns they would be taken for nine that are independent.
    assert only(*often).p > 100 * only(*(replace(one, round_sizes=(4,) * 9) for one in often)).p


def test_a_run_that_is_noisier_everywhere_weighs_less_in_every_interval():
    generator = np.random.default_rng(0)
    old, new = run(generator), run(generator, cv=0.4)
    turns = [(round_means(one), round_means(other)) for one, other in zip(old, new, strict=True)]
    ratio = significance.noise_ratio(turns)
    # 64, but for three standard errors: √(2 ψ'(3/2) / 30) = 0.25 of a logarithm.
    assert abs(math.log(ratio / 64)) < 0.75
    for change, pair in zip(compare(old, new).changes, turns, strict=True):
        _, error, freedom = significance.student_statistic(*pair, ratio)
        half_width = error * significance.quantile(0.025, freedom)
        assert math.log(change.high / change.ratio) == pytest.approx(half_width)


def test_a_sure_difference_below_the_threshold_is_none():
    generator = np.random.default_rng(0)
    old, new = (timed(generator, cv=0.001, factor=factor) for factor in (1.0, 1.04))
    change = only(old, new)
    assert change.verdict == "unchanged" and change.p < 1e-3
    assert only(old, new, thresholds={"time": 0.03}).verdict == "regression"


# Half of the variance common to a turn in a fifth of the cases: few that are unlike all others.
def few_unlike(generator):
    calls = np.geomspace(4, 431, BACKENDS * LENGTHS).round().astype(int)
    return [
        timed(
            generator, number, calls=count, cv=0.1 if number % 3 else 0.2, turn_share=0.5 * (number % 5 == 0)
        )
        for number, count in enumerate(calls)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("make", [run, few_unlike])
def test_equal_runs_show_a_regression_in_one_percent_of_all_comparisons_at_most(make):
    generator = np.random.default_rng(1)
    found = [compare(make(generator), make(generator)) for _ in range(RUNS)]
    assert sum(bool(one.of("regression")) for one in found) <= MOST_FALSE_ALARMS
    assert sum(bool(one.of("improvement")) for one in found) <= MOST_FALSE_ALARMS


@pytest.mark.slow
def test_ten_percent_more_time_is_found_with_a_power_of_95_percent():
    generator = np.random.default_rng(2)
    runs = 4000
    found = [only(timed(generator), timed(generator, factor=1.1)).verdict for _ in range(runs)]
    # Were the power less than 0.95, so many would be found once in a thousand times.
    assert found.count("regression") >= 0.95 * runs + 3 * math.sqrt(runs * 0.95 * 0.05)


def test_the_interval_holds_the_true_ratio_in_95_percent_where_calls_of_a_turn_are_alike():
    generator = np.random.default_rng(3)
    fields = {"calls": 40, "turn_share": 0.3}
    changes = [only(timed(generator, **fields), timed(generator, factor=1.2, **fields)) for _ in range(400)]
    held = sum(one.low <= 1.2 <= one.high for one in changes)
    assert abs(held - 380) <= 3 * math.sqrt(400 * 0.95 * 0.05)


def test_bytes_are_compared_to_the_byte():
    assert only(memory(), memory(peak_bytes=1001)).verdict == "regression"
    assert only(memory(), memory(peak_bytes=999)).verdict == "improvement"
    assert only(memory(), memory()).verdict == "unchanged"
    assert only(memory(), memory(peak_bytes=1010), thresholds={"memory": 0.01}).verdict == "unchanged"
    assert only(memory(peak_bytes=0), memory(peak_bytes=1)).verdict == "regression"
    elsewise = replace(memory(peak_bytes=2000), memory_method="operators")
    assert only(memory(), elsewise).verdict == "not comparable"


def test_errors_are_compared_by_their_spread_over_draws():
    generator = np.random.default_rng(0)
    draws = generator.lognormal(-2, 0.1, 16)
    assert only(errors(draws), errors(draws)).verdict == "unchanged"
    assert only(errors(draws), errors(generator.lognormal(-2, 0.1, 16))).verdict == "unchanged"
    assert only(errors(draws), errors(2 * draws)).verdict == "regression"
    assert only(errors(2 * draws), errors(draws)).verdict == "improvement"
    # One draw is reproduced by its seed.
    assert only(errors(draws[:1]), errors(2 * draws[:1])).verdict == "regression"


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("ok", "oom", "regression"),
        ("ok", "timeout", "regression"),
        ("ok", "unsupported", "regression"),
        ("crash", "ok", "improvement"),
        ("oom", "timeout", "unchanged"),
        ("ok", "skipped", "unclear"),
    ],
)
def test_what_stopped_working_is_a_regression(old, new, verdict):
    record = timed(np.random.default_rng(0))
    change = only(replace(record, status=old, reason="why"), replace(record, status=new, reason="why"))
    assert change.verdict == verdict and change.remark == f"{old} → {new}: why"


def test_cases_of_one_run_alone_are_named():
    generator = np.random.default_rng(0)
    first, second, third = (timed(generator, number) for number in range(3))
    found = compare([first, second], [second, third])
    assert found.missing == ("backend-0, 256 tokens, time",)
    assert found.added == ("backend-2, 256 tokens, time",)


def test_what_no_measurement_gives_is_not_reckoned_with():
    strange = Record(case=case(), times_s=(0.0, None, 1e300, 1e-320))
    assert only(strange, strange).verdict == "not comparable"
    constant = Record(case=case(), times_s=(1e-3,) * 20, round_sizes=(5,) * 4)
    assert only(constant, constant).verdict == "unchanged"
    assert only(constant, replace(constant, times_s=(2e-3,) * 20)).verdict == "regression"


def results(records, **environment):
    return ea.Results(records, environment=environment)


def test_another_machine_and_other_software_are_said():
    generator = np.random.default_rng(0)
    old, new = run(generator), [timed(generator, number, factor=1.2) for number in range(30)]
    found = ea.diff(results(old, processor="A", python="3.11"), results(new, processor="B", python="3.12"))
    machine, software = found.warnings
    assert machine.startswith("ANOTHER MACHINE: processor was A, is B.")
    assert "python was 3.11, is 3.12" in software
    assert ea.diff(results(old, processor="A"), results(old, processor="A")).warnings == []


def test_another_driver_of_the_same_gpu_is_other_software_whatever_its_entry_is_called():
    def warnings(then, now, **old):
        gpus = [{"name": "G", "memory_bytes": 2**30, **gpu} for gpu in (then, now)]
        sides = results([], gpu=gpus[0], **old), results([], gpu=gpus[1], torch={"version": "2.9"})
        return ea.diff(*sides).warnings

    clocks = {"clocks.max.sm": "1980 MHz", "cuda": "12.4"}
    before = {"torch": {"version": "2.9", "cuda": "12.4"}}
    assert warnings({"driver": "570"}, {"driver_version": "570", **clocks}, **before) == []
    (software,) = warnings({"driver": "570"}, {"driver_version": "580", **clocks}, **before)
    assert software == "Other surroundings: gpu.driver_version was 570, is 580."
    (machine,) = warnings({}, {"name": "H"}, torch={"version": "2.9"})
    assert machine.startswith("ANOTHER MACHINE: gpu.name was G, is H.")
    without_gpu = results([], gpu=None, **before), results([], gpu=None, torch={"version": "2.9"})
    assert ea.diff(*without_gpu).warnings == []


def test_other_kernels_of_the_same_case_are_said_and_unknown_ones_are_not():
    def warnings(*kernels):
        sides = [[replace(memory(), kernels=found), timed(np.random.default_rng(0))] for found in kernels]
        return ea.diff(*map(results, sides)).warnings

    assert warnings("cpu", "torch") == ["OTHER KERNELS in 1 cases: cpu then, torch now."]
    assert warnings("cpu", "cpu") == warnings(None, "torch") == warnings("torch", None) == []
    mixed = [results([replace(memory(), kernels=found)]) for found in ("cpu", "flex")]
    (told,) = ea.diff(mixed, mixed[0]).warnings
    assert told == "OTHER KERNELS in 1 cases: cpu or flex then, cpu now."


def test_json_gives_the_limit_of_each_quantity():
    found = ea.diff(results([memory()]), results([memory()]), fail_on={"accuracy": 0.2}).as_dict()
    assert found["thresholds"]["accuracy"] == 0.2 and found["thresholds"]["time_s"] == 0.05


def test_only_the_kinds_that_were_named_fail():
    generator = np.random.default_rng(0)
    old = [timed(generator), memory()]
    new = [timed(generator, factor=1.5), memory(peak_bytes=2000)]
    assert {one.kind for one in ea.diff(results(old), results(new)).regressions} == {"time", "memory"}
    found = ea.diff(results(old), results(new), fail_on={"time": 0.1})
    assert {one.kind for one in found.regressions} == {"time"}
    assert not ea.diff(results(old), results(new), fail_on={"time": 1.0}).regressions
    with pytest.raises(UnknownNameError, match="No quantity is called 'speed'"):
        ea.diff(results(old), results(new), fail_on={"speed": 0.1})
    with pytest.raises(OptionError, match="time is a share from 0 on"):
        ea.diff(results(old), results(new), fail_on={"time": math.nan})
    with pytest.raises(DataError, match="Cannot read records"):
        ea.diff("nowhere", results(new))


def test_of_equal_cases_in_a_run_the_last_record_counts_whatever_their_label():
    renamed = replace(memory(), case=replace(memory().case, label="other"))
    found = compare([memory()], [memory(peak_bytes=9000), renamed])
    assert {change.verdict for change in found.changes} == {"unchanged"}
    assert not found.missing and not found.added
