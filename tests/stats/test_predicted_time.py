"""Times and crossovers that are predicted from short calls."""

import math
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from efficient_attn.measure.calls import attention_cost
from efficient_attn.measure.record import Record, read
from efficient_attn.measure.variants import select
from efficient_attn.stats.estimates import Typical
from efficient_attn.stats.predicted_time import crossover, extrapolated, time_models

# Batch, heads and head dimension of the calls that predict.
SHAPES = ((1, 1, 64), (1, 8, 32), (1, 2, 128))
LENGTHS = (256, 512, 1024)
RATES = (2e-4, 1e-7, 2e-11, 4e-10, 1e-10)


def case(label, tokens, shape=(1, 8, 64), **changes):
    (variant,) = select([label])
    sizes = dict(zip(("batch", "num_heads", "head_dim"), shape, strict=True))
    machine = {"dtype": "float32", "device": "cpu", "threads": 1, **changes}
    return variant.case(kind="time", tokens=tokens, **sizes, **machine)


def true_time(call):
    cost = attention_cost(call, call.backend)
    moved = cost.moved_bytes + cost.kept_bytes
    return float(np.dot(RATES, (1, call.tokens, cost.flops, cost.exponentials, moved)))


def calls(label, *, noise=0.0, seed=0, slower=1.0):
    """Records of calls whose times follow the model, up to a lognormal scatter."""
    draw = np.random.default_rng(seed)
    records = []
    for call in (case(label, tokens, shape) for shape in SHAPES for tokens in LENGTHS):
        time_s = slower * true_time(call) * math.exp(noise * draw.standard_normal())
        records.append(Record(case=call, times_s=(time_s,) * 8, round_sizes=(2, 2, 2, 2)))
    return records


def sizes_of(call):
    return {name: getattr(call, name) for name in ("tokens", "batch", "num_heads", "head_dim")}


def test_calls_without_noise_predict_every_shape_and_length_and_two_calls_predict_nothing():
    models = time_models([*calls("exact"), *calls("window")])
    for label in ("exact", "window"):
        unseen = case(label, 8192, (4, 12, 96))
        predicted = models[label].time_s(**sizes_of(unseen))
        assert predicted.value == pytest.approx(true_time(unseen), rel=1e-6)
        assert predicted.low == pytest.approx(predicted.high, rel=1e-4)
    assert time_models(calls("exact")[:2]) == {}


def test_the_predicted_crossover_is_the_length_of_equal_times():
    # With equal rates both take equally long wherever the window holds all tokens.
    models = time_models([*calls("exact"), *calls("window", slower=3)])
    sizes = {"num_heads": 8, "head_dim": 64}
    speeds = {n: models["window"].speed(models["exact"], tokens=n, **sizes) for n in range(128, 4096, 64)}
    predicted = crossover(speeds)
    times_s = {label: true_time(case(label, round(predicted.value))) for label in ("exact", "window")}
    assert predicted.value > 128 and 3 * times_s["window"] == pytest.approx(times_s["exact"], rel=0.02)
    assert predicted.low == pytest.approx(predicted.value, rel=1e-3)
    slow = time_models(calls("window", slower=1e3))["window"]
    assert slow.speed(models["exact"], tokens=512).high < 1


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


@pytest.mark.slow
def test_intervals_hold_unseen_times_of_noisy_machines():
    inside, unseen = [], case("window", 8192, (4, 4, 32))
    for seed in range(100):
        model = time_models(calls("window", noise=0.1, seed=seed))["window"]
        _, low, high = model.time_s(**sizes_of(unseen))
        inside.append(low <= true_time(unseen) <= high)
    assert np.mean(inside) > 0.9


@pytest.mark.slow
def test_the_coverage_that_the_page_states_follows_from_the_committed_records(capsys):
    root = Path(__file__).parents[2]
    script = root / "results" / "epyc-2-cores" / "predicted-times" / "make.py"
    namespace = runpy.run_path(str(script))
    namespace["report"]("causal", list(read(script.with_name("causal.jsonl")).records))
    counts = re.findall(r"(\d+ of \d+)", capsys.readouterr().out)
    assert len(counts) == 4
    page = (root / "docs" / "advise.md").read_text(encoding="utf-8")
    assert f"| float32, causal | {' | '.join(counts)} |" in page
