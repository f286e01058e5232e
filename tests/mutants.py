"""Mutation tests: small faults put into the code one at a time, and the tests that must fail for each.

The list is tests/mutants.tsv: file, old fragment, new fragment, tests; tab-separated, one fault a line, ⏎ for
the end of a line in a fragment. A fifth column argues why a fault changes nothing that can be observed;
such rows are run and count for nothing.

    python tests/mutants.py [PATTERN] [--jobs N]

Exit code 1: a fault survived. Exit code 2: the tests fail without a fault, or a row does not apply.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_suffix(".tsv")

# The end of a line within a fragment.
_NEW_LINE = "⏎"

# A fault that makes a test wait for ever is found by that.
_LIMIT_S = 300
# Outcomes of pytest: 0 all passed, 1 some failed, 2 a test file cannot be imported, 5 no test was selected.
_PASSED, _FAILED, _NOTHING_RAN = 0, (1, 2), 5


class Mutant(NamedTuple):
    """One fault."""

    file: str
    old: str
    new: str
    tests: str
    equivalent: str = ""

    def applied(self, text: str) -> str:
        """The text of the file with the fault in it."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


def mutants() -> Iterator[Mutant]:
    """The rows of the list; blank lines and those that begin with # are left out."""
    for row in LIST.read_text(encoding="utf-8").splitlines():
        if row.strip() and not row.startswith("#"):
            yield Mutant(*row.replace(_NEW_LINE, "\n").split("\t"))


def checkout(folder: Path) -> Path:
    """A copy of the files that git knows or could know, from which both packages are imported."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / "efficient_attn_cli").symlink_to("cli")
    return folder


def outcome(folder: Path, tests: str, *options: str) -> tuple[int | None, str]:
    """The exit code of pytest on the copy, None if it had to be ended; and the end of its output.

    Slow tests run where a row names nothing else.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests.split()]
    # The copy goes before the installed package.
    settings = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(folder)}, "timeout": _LIMIT_S}
    try:
        ended = subprocess.run([*command, *options], capture_output=True, text=True, **settings)
    except subprocess.TimeoutExpired:
        return None, f"longer than {_LIMIT_S} s"
    if ended.returncode == _NOTHING_RAN and not options:
        return outcome(folder, tests, "-m", "")
    return ended.returncode, ended.stdout[-2000:] + ended.stderr[-1000:]


def write(path: Path, text: str) -> None:
    """Write a source and forget what was compiled from it: its time may be that of the source before."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def killed(mutant: Mutant, folder: Path) -> bool:
    """Whether a test fails with the fault in the copy, which is whole again afterwards."""
    path = folder / mutant.file
    whole = path.read_text(encoding="utf-8")
    write(path, mutant.applied(whole))
    try:
        code, told = outcome(folder, mutant.tests)
    finally:
        write(path, whole)
    if code not in (None, _PASSED, *_FAILED):
        raise ValueError(f"pytest ends with {code} on {mutant.tests}: {told}")
    return code != _PASSED


def main() -> int:
    """Run the faults that match; print each and the score."""
    parser = argparse.ArgumentParser(description="Run the list of faults in tests/mutants.tsv.")
    parser.add_argument("pattern", nargs="?", default="", help="Regular expression that a row must match.")
    parser.add_argument("--jobs", type=int, default=1, help="Faults at once, each in a copy of its own.")
    asked = parser.parse_args()
    chosen = [mutant for mutant in mutants() if re.search(asked.pattern, "\t".join(mutant))]
    copies, score = local(), Counter()

    def copy() -> None:
        copies.folder = checkout(Path(tempfile.mkdtemp(dir=root)))

    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(asked.jobs, initializer=copy) as pool:
        tests = sorted({mutant.tests for mutant in chosen})
        wholes = [*pool.map(lambda names: outcome(copies.folder, names), tests)]
        failing = {names: told for names, (code, told) in zip(tests, wholes, strict=True) if code != _PASSED}
        for names, told in failing.items():
            print(f"{told}\nFails without any fault: {names}")
        chosen = [mutant for mutant in chosen if mutant.tests not in failing]
        outcomes = pool.map(lambda mutant: killed(mutant, copies.folder), chosen)
        for mutant, dead in zip(chosen, outcomes, strict=True):
            word = "killed" if dead else "equivalent" if mutant.equivalent else "SURVIVED"
            score[word] += 1
            print(f"{word:10} {mutant.file}: {mutant.old!r} -> {mutant.new!r}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in score.items()))
    return 2 if failing else min(score["SURVIVED"], 1)


if __name__ == "__main__":
    sys.exit(main())
