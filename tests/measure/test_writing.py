"""Writing under adversity: whatever fails, what was there stays whole and one line says what happened."""

import builtins
import errno
import json
import os
import stat
from pathlib import Path

import pytest
from synthetic_records import case

from efficient_attn.errors import DataError
from efficient_attn.measure.record import Record, append, line, read
from efficient_attn.report.files import write
from efficient_attn.runs.store import mend, only_writer, open_folder, run_folder

RECORD = Record(case=case("time", "b", 1), times_s=(0.5,))
MACHINE = {"command": [], "study": "bench", "code": {}, "torch": {"version": "2"}}
FAILURES = (errno.ENOSPC, errno.EACCES)
OPEN = open
WRITE = os.write


def halved(descriptor, data):
    """`os.write` that takes half of it, as a signal or a nearly full disk makes it do."""
    return WRITE(descriptor, data[: (len(data) + 1) // 2])


class Fault:
    """Lets the k-th call that writes fail; `came` says whether there were so many."""

    def __init__(self, k, number):
        self.left, self.number, self.came = k, number, False

    def faulty(self, call):
        def failing(*args, **settings):
            self.left -= 1
            if self.left == 0:
                self.came = True
                raise OSError(self.number, os.strerror(self.number))
            return call(*args, **settings)

        return failing

    def opened(self, file, mode="r", *args, **settings):
        if "r" in mode and "+" not in mode:
            return OPEN(file, mode, *args, **settings)
        stream = self.faulty(OPEN)(file, mode, *args, **settings)
        stream.write = self.faulty(stream.write)
        return stream


def outcomes(monkeypatch, act, check, most=40):
    """Let the first, second, … call fail in every way until there is no such call any more."""
    for number in FAILURES:
        for k in range(1, most):
            fault = Fault(k, number)
            with monkeypatch.context() as patch:
                patch.setattr(builtins, "open", fault.opened)
                for name in ("open", "write", "fsync", "replace", "truncate", "mkdir"):
                    patch.setattr(os, name, fault.faulty(getattr(os, name)))
                try:
                    act()
                    failed = None
                except DataError as error:
                    failed = str(error)
            check(failed)
            # A clear message, or it was not needed.
            assert failed is None or (os.strerror(number) in failed and "\n" not in failed)
            if not fault.came:
                assert failed is None
                break
        else:
            pytest.fail("there was no end of calls")


def test_a_file_is_the_old_one_or_the_new_one_whichever_call_fails(tmp_path, monkeypatch):
    path = tmp_path / "summary.csv"
    path.write_text("old")

    def check(failed):
        assert path.read_text() in (["new"] if failed is None else ["old", "new"])
        assert [file.name for file in tmp_path.iterdir()] == ["summary.csv"]
        path.write_text("old")

    outcomes(monkeypatch, lambda: write(path, "new"), check)


def test_a_record_is_a_whole_line_or_none_of_it_whichever_call_fails_after_a_part(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    append(path, RECORD)
    before = path.read_bytes()
    monkeypatch.setattr(os, "write", halved)

    def check(failed):
        assert path.read_bytes() == (before * 2 if failed is None else before)
        path.write_bytes(before)

    outcomes(monkeypatch, lambda: append(path, RECORD), check)


def test_a_run_is_taken_up_or_left_as_it_was_whichever_call_fails(tmp_path, monkeypatch):
    whole = f"{line(RECORD)}\n"

    def lay_out(failed=None):
        folder = tmp_path / "out"
        folder.mkdir(exist_ok=True)
        (folder / "environment.json").write_text(json.dumps(MACHINE))
        (folder / "records.jsonl").write_text(whole + whole[:-9])
        assert failed is None or read(folder / "records.jsonl").records == (RECORD,)

    def act():
        folder = open_folder(tmp_path / "out", name="out")
        with only_writer(folder):
            mend(folder / "records.jsonl", read(folder / "records.jsonl"))
        assert read(folder / "records.jsonl").records == (RECORD,)

    lay_out()
    outcomes(monkeypatch, act, lay_out)


@pytest.mark.skipif(os.name != "posix", reason="folders cannot be waited for")
def test_files_and_their_names_are_on_the_disk_when_they_are_acknowledged(tmp_path, monkeypatch):
    # All that would survive a power failure: bytes and names as they were at the last `fsync`.
    sizes, names, fsync, replace = {}, {}, os.fsync, os.replace

    def counted(descriptor):
        fsync(descriptor)
        about = os.fstat(descriptor)
        if stat.S_ISDIR(about.st_mode):
            names.update({entry.name: entry.inode() for entry in os.scandir(descriptor)})
        else:
            sizes[about.st_ino] = about.st_size

    def replaced(part, target):
        assert sizes.get(os.stat(part).st_ino) == len("content")
        replace(part, target)

    monkeypatch.setattr(os, "fsync", counted)
    monkeypatch.setattr(os, "replace", replaced)
    path, records = tmp_path / "summary.csv", tmp_path / "records.jsonl"
    for _ in range(2):
        write(path, "content")
        append(records, RECORD)
        for file in (path, records):
            about = file.stat()
            assert names.get(file.name) == about.st_ino and sizes.get(about.st_ino) == about.st_size


def test_a_link_in_the_place_of_a_written_file_is_replaced_and_not_followed(tmp_path):
    target, link = tmp_path / "precious", tmp_path / "report.html"
    target.write_text("precious")
    link.symlink_to(target)
    write(link, "page")
    assert target.read_text() == "precious" and link.read_text() == "page" and not link.is_symlink()


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="links are not refused here")
@pytest.mark.parametrize("name", ["records.jsonl", ".lock", ".trial"])
def test_a_link_in_the_place_of_a_file_of_ours_is_not_followed(tmp_path, name):
    target, folder = tmp_path / "precious", tmp_path / "out"
    target.write_text("precious\n")
    folder.mkdir()
    (folder / name).symlink_to(target)
    with pytest.raises(DataError, match=r"Cannot write|cannot write"), only_writer(open_folder(folder)):
        append(folder / "records.jsonl", RECORD)
    assert target.read_text() == "precious\n"


LONG = "é" * 127 + "x"  # 255 bytes
REFUSED = {f"{LONG}y": "name too long", "file/below": "Not a directory", "-": "is a folder", "a\0b": "null"}


def test_a_folder_of_any_name_is_made_or_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for name in ("missing/a/b", LONG, "naïve 結果 \U0001f600"):
        append(open_folder(name) / "records.jsonl", RECORD)
    for name, message in REFUSED.items():
        with pytest.raises(DataError, match=f"--out.*({message})"):
            open_folder(name, name="--out")


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len({open_folder(run_folder("bench")).name for _ in range(3)}) == 3
