"""Times and crossovers that are predicted from short calls."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from efficient_attn.measure.record import read
from efficient_attn.stats.estimates import Typical
from efficient_attn.stats.predicted_time import crossover, extrapolated

LENGTHS = (256, 512, 1024)


def test_a_crossover_follows_from_speeds_and_ends_of_their_intervals():
    speeds = {256: Typical(0.5, 0.4, 0.625, 4), 1024: Typical(2.0, 1.6, 2.5, 4)}
    value, low, high = crossover(speeds)
    # The logarithms of both lengths have opposite signs.
    assert value == pytest.approx(512) and low * high == pytest.approx(512**2) and low < value < high
    value, low, high = crossover({**speeds, 2048: Typical(0.9, 0.7, 1.1, 0)})
    assert value is high is None and 256 < low < 512


@pytest.mark.parametrize("rates", [(1e-3, 2e-6, 3e-9), (1e-3, 0, 3e-9), (0, 2e-6, 0)])
def test_a_longer_time_is_a_quadratic_of_the_tokens_with_the_scatter_of_three_times_or_more(rates):
    times_s = {n: float(np.dot(rates, (1, n, n**2))) for n in (*LENGTHS, 2048, 8192)}
    true_s = times_s.pop(8192)
    assert extrapolated(times_s, 8192) == pytest.approx((true_s,) * 3, rel=1e-6)
    assert extrapolated(times_s, 512) == (times_s[512],) * 3
    noisy_s = {tokens: time_s * (1.1 if tokens == 512 else 1) for tokens, time_s in times_s.items()}
    value, low, high = extrapolated(noisy_s, 8192)
    assert low < min(true_s, value) and max(true_s, value) < high
    assert extrapolated({tokens: times_s[tokens] for tokens in (256, 512)}, 8192) is None


def test_a_time_that_grows_with_the_tokens_has_no_part_per_pair_of_them():
    # The last call took longer by chance, which a parabola would magnify.
    times_s = {256: 5e-4, 512: 1e-3, 1024: 2.4e-3}
    line, parabola = (extrapolated(times_s, 8192, growth)[0] for growth in (1, 2))
    assert 1.6e-2 < line < 2e-2 < parabola


@pytest.mark.slow
def test_the_coverage_that_the_page_states_follows_from_the_committed_records(capsys):
    root = Path(__file__).parents[2]
    script = root / "results" / "epyc-2-cores" / "predicted-times" / "make.py"
    namespace = runpy.run_path(str(script))
    namespace["report"]("causal", list(read(script.with_name("causal.jsonl")).records))
    counts = re.findall(r"(\d+ of \d+)", capsys.readouterr().out)
    assert len(counts) == 2
    page = (root / "docs" / "advise.md").read_text(encoding="utf-8")
    assert f"| float32, causal | {' | '.join(counts)} |" in page
