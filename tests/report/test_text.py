"""Numbers in words: two digits at least, no ratio below one, no claim without a side."""

import pytest

from efficient_attn.report.table import Table, to_markdown
from efficient_attn.report.text import compared, rounded, show_ratio, show_spread
from efficient_attn.stats.estimates import Typical


@pytest.mark.parametrize(
    ("value", "low", "high", "shown"),
    [
        *[(280.4, 264.0, 297.0, "280"), (76.7, 50.0, 118.0, "77"), (1.18, 0.7, 1.9, "1.2")],
        *[(8.05, 5.54, 11.7, "8.1"), (257.0, 100.0, 400.0, "260"), (0.333, 0.28, 0.395, "0.33")],
        *[(14.8, None, None, "14.8")],
        *[(5.0, 5.0, 5.0, "5.00"), (1.0, 1e-9, 1e9, "1.0")],
    ],
)
def test_a_value_has_two_digits_and_a_third_that_its_interval_settles(value, low, high, shown):
    assert rounded(value, low, high) == shown


@pytest.mark.parametrize(
    ("ratio", "words", "cell"),
    [
        ((8.05, 7.0, 9.2), "8.1 ± 1 times faster", "8.1×\t7.0 to 9.2"),
        ((0.25, 0.22, 0.28), "4.0 ± 0.5 times slower", "0.25×\t0.22 to 0.28"),
        ((2.5, 1.2, 5.1), "2.5 times faster (1.2 to 5.1)", "2.5×\t1.2 to 5.1"),
        ((0.9, 0.5, 1.6), "undecided, 0.90× the speed (0.50 to 1.6)", "0.90×?\t0.50 to 1.6"),
        ((8.0, 2.0, 34.0), "8.0 times faster (interval beyond ×3)", "8.0×\tinterval beyond ×3"),
        ((3.9, None, None), "3.9 times faster", "3.9×?"),
        ((1.02, 0.97, 1.08), "as fast within 10 % (0.97 to 1.08×)", "1.02×\t0.97 to 1.08"),
    ],
)
def test_a_ratio_is_faster_slower_the_same_or_undecided(ratio, words, cell):
    assert (compared(Typical(*ratio, samples=8)), show_ratio(Typical(*ratio, samples=8))) == (words, cell)


def test_an_interval_beyond_three_times_the_value_is_said_without_a_percentage():
    assert show_spread(2e-3, 1e-4, 100.0, unit=1e-3) == "2.0?\tinterval beyond ×3"


def test_the_best_value_is_decided_and_no_baseline_and_worse_than_uniform_attention_is_marked():
    rows = (("exact", "1e-7", "1×"), ("a", "0.5", "3×?"), ("b", "0.2", "2×"), ("c", "9", "2×"))
    table = Table("", ("backend", "error", "speed"), (*rows, ("uniform attention", "0.8", "40×")))
    marked = table.compared(errors=["error"], speeds=["speed"])
    assert (marked.best, marked.worse) == (((2, 1),), ((3, 1),))


def test_markdown_keeps_intervals_and_powers_and_aligns_numbers():
    small = Table("Time", ("backend", "64", "grows as"), (("exact", "1.5 ±20%", "n^1.98 (1.95 to 2.01)"),))
    assert r"| exact | 1.5 ±20\% | n^1.98 (1.95 to 2.01) |" in to_markdown(small)
    assert "| --- | ---: | --- |" in to_markdown(small)
