"""The text that models are trained on: what is read, what is held out, what is refused."""

import numpy as np
import pytest

from efficient_attn.errors import DataError
from efficient_attn.studies.train.text import Text, batch_at, read_text, windows

LONG = b"abcdefghij" * 100


def written(path, data):
    path.write_bytes(data)
    return path


def test_the_last_tenth_of_a_file_is_held_out(tmp_path):
    text = read_text(written(tmp_path / "my.txt", LONG), tokens=4)
    assert bytes(text.train) + bytes(text.held_out) == LONG and len(text.held_out) == 100
    assert text.name == "my.txt"
    other = read_text(written(tmp_path / "other.txt", LONG[:-1] + b"x"), tokens=4)
    assert text.sha256 != other.sha256


def test_every_tenth_file_of_the_library_is_held_out():
    text = read_text(None, tokens=256)
    assert text.name.startswith("stdlib-3.")
    assert b"def dataclass(" in bytes(text.train) + bytes(text.held_out)
    assert 0.02 < len(text.held_out) / len(text.train) < 0.5
    assert read_text(None, tokens=256).sha256 == text.sha256


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b"",
            r"has 0 bytes\. Windows of 16 tokens need 1360, so that 8 can be held out: give a longer text or",
        ),
        (b"x" * 1000, r"has 1000 bytes\. .* give a longer text or a smaller seq_len\."),
        (b"x" * 2000 + b"\0", r"no text: it holds a zero byte\."),
        ("x".encode("utf-16") * 900, r"no UTF-8 text: byte 0 is 0xff\."),
        (b"caf\xe9" * 900, r"no UTF-8 text: byte 3 is 0xe9\."),
    ],
)
def test_what_is_no_text_or_too_short_is_refused_in_one_line(data, message, tmp_path):
    with pytest.raises(DataError, match=message) as caught:
        read_text(written(tmp_path / "bad.txt", data), tokens=16)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("text: ")


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_what_cannot_be_read_is_refused(name, tmp_path):
    with pytest.raises(DataError, match=r"text: cannot read .*: (No such file|Is a directory)"):
        read_text(tmp_path / name, tokens=16)


def test_held_out_windows_do_not_overlap_and_reach_both_ends():
    found = windows(np.arange(100, dtype=np.uint8), 64, tokens=9)
    assert found.shape == (10, 10) and len(np.unique(found)) == 100
    few = windows(np.arange(100, dtype=np.uint8), 3, tokens=9)
    assert few[0, 0] == 0 and few[-1, -1] == 99


def test_a_batch_depends_on_the_seed_and_the_step_alone():
    text = Text("", np.arange(250, dtype=np.uint8), np.zeros(0, dtype=np.uint8), "")

    def batch(step, seed=0):
        return batch_at(step, text, seed=seed, batch=4, tokens=8)

    assert (batch(3) == batch(3)).all()
    assert (batch(3) != batch(4)).any() and (batch(3) != batch(3, seed=1)).any()
    assert (np.diff(batch(3)) == 1).all() and batch(3).shape == (4, 9)


def test_every_window_of_the_text_can_be_drawn():
    text = Text("", np.arange(12, dtype=np.uint8), np.zeros(0, dtype=np.uint8), "")
    starts = {int(row[0]) for step in range(50) for row in batch_at(step, text, seed=0, batch=4, tokens=8)}
    assert starts == {0, 1, 2, 3}
