"""Records with many samples: the limit that writers and readers hold, and the time that a million takes."""

import json
import time

import numpy as np
import pytest

import efficient_attn as ea
from efficient_attn import limits
from efficient_attn.errors import DataError
from efficient_attn.measure.record import Case, Record, merge_rounds, replace
from efficient_attn.measure.records import append, line, parse

# The work of `slowness` on an idle core of the machine where the limit was set.
YARDSTICK_S = 0.1

LENGTHS = (256, 512, 1024, 2048, 4096)


def case(kind, label="exact", tokens=256, **fields):
    about = {"num_heads": 8, "head_dim": 64, "dtype": "float32", "device": "cpu", "threads": 2, **fields}
    return Case(kind=kind, backend=label, label=label, tokens=tokens, **about)


def noise(seed, count=limits.SAMPLES):
    return np.exp(0.05 * np.random.default_rng(seed).standard_normal(count))


def timed(rounds):
    sizes = (limits.SAMPLES // rounds,) * rounds
    return [
        Record(
            case=case("time", label, tokens),
            times_s=tuple(1e-6 * tokens * noise(tokens, sum(sizes))),
            round_sizes=sizes,
            waited_s=0.0,
        )
        for label in ("exact", "window")
        for tokens in LENGTHS
    ]


def drawn():
    return [
        Record(
            case=case("error", label, tokens, of="output"),
            output_relative_error=0.5,
            output_relative_error_draws=tuple(0.5 * noise(tokens)),
        )
        for label in ("performer-positive(num_features=64)", "performer-trigonometric(num_features=64)")
        for tokens in LENGTHS
    ]


def recalled():
    return [
        Record(
            case=case("recall", "exact", seed=seed, inputs="recall"),
            times_s=tuple(1e-2 * noise(seed)),
            accuracy=0.9,
            answers=2048,
            chance=1 / 16,
        )
        for seed in range(10)
    ]


MANY = {
    "4 rounds": lambda: timed(4),
    "1000 rounds": lambda: timed(1000),
    "10000 rounds": lambda: timed(10_000),
    "draws": drawn,
    "steps": recalled,
}


def slowness():
    """CPU time of a fixed piece of work over that of an idle core: a loaded core is up to twice as slow."""
    start = time.process_time()
    sum(number * number for number in range(2_000_000))
    return max(1.0, (time.process_time() - start) / YARDSTICK_S)


@pytest.mark.slow
@pytest.mark.parametrize("made", MANY)
def test_a_million_samples_are_read_summarised_drawn_and_compared_in_five_seconds_each(made, tmp_path):
    records = MANY[made]()
    path = tmp_path / "records.jsonl"
    path.write_text("".join(f"{line(record)}\n" for record in records))
    small = ea.Results([replace(records[0], times_s=records[0].times_s and records[0].times_s[:8])])
    # The first drawing loads matplotlib and its fonts.
    small.save(tmp_path / "small")
    slow, start = slowness(), time.process_time()
    results = ea.read(path)
    results.sentences()
    results.save(tmp_path / "drawn")
    drawn_s = time.process_time() - start
    assert not ea.diff(results, results).regressions
    compared_s, slow = time.process_time() - start - drawn_s, max(slow, slowness())
    assert drawn_s <= 5 * slow and compared_s <= 5 * slow


def test_more_samples_than_a_record_may_have_are_refused_by_writer_and_reader(tmp_path):
    full = Record(case=case("time"), times_s=(1e-3,) * limits.SAMPLES)
    row = json.loads(line(full))
    assert parse(json.dumps(row).encode(), "It") == full
    message = f"times_s has {limits.SAMPLES + 1} entries; at most {limits.SAMPLES} are kept in a record"
    row["times_s"].append(1e-3)
    with pytest.raises(
        DataError, match=f"It: times_s cannot be .*; expected `array` of length <= {limits.SAMPLES}"
    ):
        parse(json.dumps(row).encode(), "It")
    with pytest.raises(DataError, match=f"exact, 256 tokens, time: {message}"):
        append(tmp_path / "records.jsonl", replace(full, times_s=(1e-3,) * (limits.SAMPLES + 1)))
    assert not (tmp_path / "records.jsonl").exists()


def test_a_time_in_many_rounds_keeps_the_first_calls_of_each():
    part = Record(
        case=case("time"), times_s=tuple(map(float, range(1, 1001))), round_sizes=(1000,), waited_s=1.0
    )
    whole, cut = merge_rounds([part] * 100), merge_rounds([part] * 260)
    assert len(whole.times_s) == 100_000 and whole.waited_s == 100
    assert cut.round_sizes == (384,) * 260 and cut.times_s[:3] == (1.0, 2.0, 3.0)
    # Threads waited for all calls, of which 384 of 1000 are left.
    assert cut.waited_s == pytest.approx(260 * 0.384)
    assert len(line(cut)) < limits.RECORD_LINE_BYTES
