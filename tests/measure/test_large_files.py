"""The largest files that readers take: two seconds and 256 MB, whatever is in them."""

import json
import subprocess
import sys

import pytest

from efficient_attn import limits
from efficient_attn.errors import DataError
from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.records import line, read

pytestmark = pytest.mark.slow

CASE = Case(
    kind="time", backend="b", label="b", num_heads=1, head_dim=1, tokens=1, dtype="d", device="cpu", threads=1
)

# What reading takes beyond what the process has anyway: processor seconds, so that others do not count, and
# kilobytes of its largest size.
READ = """
import re, sys, time
from pathlib import Path
from efficient_attn.errors import DataError
from efficient_attn.measure.records import read

def largest_kb():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

before, start = largest_kb(), time.process_time()
try:
    said = len(read(sys.argv[1]).records)
except DataError as error:
    said = "DataError"
print(said, time.process_time() - start, largest_kb() - before)
"""
MOST_S, MOST_BYTES = 2.0, 256e6


def row(**changes):
    return {**json.loads(line(Record(case=CASE))), **changes}


FILES = {
    # Samples of 4 rounds of a short call.
    "as written": lambda: row(times_s=[1 / (7 + number) for number in range(4000)]),
    "numbers of one digit": lambda: row(times_s=[0.5] * limits.SAMPLES),
    "lists in a list": lambda: row(times_s=[[]] * 1_000_000),
    "options without end": lambda: row(options={f"{number}": number for number in range(limits.OPTIONS)}),
}


def fill(path, made):
    """As much as is read of a file."""
    text = f"{json.dumps(made)}\n"
    path.write_text(text * min(limits.RECORDS_LINES, limits.RECORDS_BYTES // len(text)), encoding="utf-8")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("made", FILES)
def test_the_largest_file_is_read_or_refused_in_two_seconds_and_256_megabytes(made, tmp_path):
    fill(tmp_path / "it", FILES[made]())
    command = [sys.executable, "-c", READ, str(tmp_path / "it")]
    said, seconds, taken_kb = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.split()
    assert float(seconds) <= MOST_S and float(taken_kb) * 1024 <= MOST_BYTES
    assert (said == "DataError") == (made != "as written")


def test_what_is_larger_is_refused_by_what_is_too_much_of_it(monkeypatch, tmp_path):
    path = tmp_path / "it"
    text = f"{line(Record(case=CASE))}\n"
    path.write_text(text * 3)
    for limit, value, message in (
        ("RECORD_LINE_BYTES", len(text) - 1, "line 1 is longer than"),
        ("RECORDS_BYTES", 3 * len(text) - 1, "is larger than"),
        ("RECORDS_LINES", 2, "has more than 2 lines"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(limits, limit, value + 1)
            assert len(read(path).records) == 3
            patch.setattr(limits, limit, value)
            with pytest.raises(DataError, match=message):
                read(path)


def test_a_file_without_end_is_refused():
    with pytest.raises(DataError, match="line 1 is longer than"):
        read("/dev/zero")
