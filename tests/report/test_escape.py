"""Names are anybody's: no table lets one of them become markup, a command or a formula."""

import re

import pytest

from efficient_attn.report.table import Table, to_markdown

HOSTILE = (
    "a|b `code` under_score_ *bold* 100% a&b #1 $x$ {x} x^2 ~x~ [5cm] <b>",
    "a\\b \\input{/etc/passwd} \\\\[5cm]",
    "two\nlines\u2028and\x1b[31mred\u202egnp\ud800",
    "![x](https://example.org/x.png)",
    "--",
    "- item",
)


def table(*names):
    return Table(names[0], ("backend", "64"), tuple((name, "1.5 ±20%") for name in names), names)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_changes_no_line_and_no_cell_of_a_markdown_table(name):
    title, body, note = to_markdown(table(name)).split("\n\n")
    rows = body.split("\n")
    assert [len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in rows] == [3, 3, 3]
    assert len(title.splitlines()) == len(note.splitlines()) == 1
    for text in (title[2:-2], rows[2].split(" | ")[0][2:], note):
        assert not re.search(r"[`*_<>\[\]{}#$%&~!|]", re.sub(r"\\[!-/:-@\[-`{-~]", "", text))
        assert text.isprintable()
    assert not re.match(r"\s*(?:[-+=]|\d+[.)])", note)


def test_tables_keep_intervals_and_powers():
    small = Table("Time", ("backend", "64", "grows as"), (("exact", "1.5 ±20%", "n^1.98 (1.95 to 2.01)"),))
    assert r"| exact | 1.5 ±20\% | n^1.98 (1.95 to 2.01) |" in to_markdown(small)
    assert "| --- | ---: | --- |" in to_markdown(small)
