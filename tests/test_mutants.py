"""The list of mutation tests: every fault can still be put in, so that a run of it means something."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from mutants import mutants

ROOT = Path(__file__).parent.parent
ALL = list(mutants())


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in ALL}))
def test_every_fault_of_the_list_applies_to_its_file_and_can_be_compiled(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    for mutant in (one for one in ALL if one.file == file):
        changed = mutant.applied(text)
        assert changed != text
        if file.endswith(".py"):
            ast.parse(changed)


def test_the_tests_of_every_fault_exist():
    words = {word for mutant in ALL for word in mutant.tests.split()}
    for test in {word for word in words if word.startswith("tests/")}:
        file, _, name = test.partition("::")
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_the_list_is_long_enough_and_names_no_fault_twice():
    assert len([one for one in ALL if not one.equivalent]) >= 120
    assert max(Counter((one.file, one.old, one.new) for one in ALL).values()) == 1
