"""The public interface changes with an entry in the changelog only."""

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from public import CHANGELOG, FILE, changes, interface, parsed, text, unnamed

BEFORE = parsed(FILE.read_text(encoding="utf-8"))


def test_every_change_of_the_public_interface_is_named_in_the_changelog() -> None:
    missing = unnamed(changes(BEFORE, interface()), CHANGELOG.read_text(encoding="utf-8"))
    assert missing == [], "Name these under Unreleased in CHANGELOG.md, with their owner."


def test_the_file_holds_every_sort_of_interface_and_reads_as_it_was_written() -> None:
    assert parsed(text(BEFORE)) == BEFORE
    assert "1. backends = None" in BEFORE["efficient_attn.bench"]
    assert ".records" in BEFORE["efficient_attn.Results"]
    assert ".relative_error" in BEFORE["returned: efficient_attn.studies.audit.Audit"]
    assert "1. model" in BEFORE["efficient_attn.integrations.transformers.attach"]
    assert "is a ValueError" in BEFORE["efficient_attn.ShapeError"]
    assert "num_features = 256" in BEFORE["backend performer-positive"]
    assert "--head-dim = 64" in BEFORE["command bench"] and "WRONG_REQUEST = 2" in BEFORE["exit codes"]
    assert "times_s: numbers in s" in BEFORE["records of bench"] and "schema = 2" in BEFORE["records"]


def changed(owner: str, old: str | None, new: str | None) -> list[tuple[str, str]]:
    lines = [line for line in BEFORE[owner] if line != old]
    return [*changes(BEFORE, {**BEFORE, owner: [*lines, new] if new else lines})]


@pytest.mark.parametrize(
    ("owner", "old", "new", "entry"),
    [
        ("efficient_attn.bench", "batch = 1", "batch = 2", "- `batch` of `ea.bench` is 2."),
        ("efficient_attn.Results", ".notes", None, "- `Results.notes` is gone."),
        ("backend window", "window = 257", "window = 129", "- `window` of the backend `window` is 129."),
        ("command bench", "--head-dim = 64", "--head-dim = 32", "- `bench --head-dim` is 32."),
        ("exit codes", "REGRESSION = 1", "REGRESSION = 5", "- The exit codes: REGRESSION is 5; codes, exit"),
        ("records of bench", None, "energy_j: number in J", "- `energy_j` in the records of\n  `bench`."),
    ],
)
def test_a_change_needs_an_entry_that_names_it_with_its_owner(owner, old, new, entry) -> None:
    found = changed(owner, old, new)
    page = "# Changelog\n\n## [Unreleased]\n\n{}\n\n## [0.1.0]\n\n{}\n"
    assert found and unnamed(found, page.format(entry, "")) == []
    for other in (page.format("- Something else.", ""), page.format("", entry)):
        assert unnamed(found, other) == [f"{owner}: {line}" for _, line in found]


def test_a_name_that_came_or_went_is_named_once_and_one_change_of_many_owners_too() -> None:
    less = {name: lines for name, lines in BEFORE.items() if name != "efficient_attn.audit"}
    page = "## [Unreleased]\n- `ea.audit` and `--threads`.\n"
    assert unnamed(changes(less, BEFORE), page) == unnamed(changes(BEFORE, less), page) == []
    assert unnamed(changes(BEFORE, less), "") == ["efficient_attn.audit"]
    without = {name: [one for one in lines if one != "--threads"] for name, lines in BEFORE.items()}
    assert len([*changes(BEFORE, without)]) > 5
    assert unnamed(changes(BEFORE, without), page) == []
    assert unnamed(changes(BEFORE, without), "")
