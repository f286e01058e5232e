"""Where an error comes from: bias, spread over draws, rounding."""

import pytest
import torch

import efficient_attn as ea
from efficient_attn.errors import OptionError
from efficient_attn.measure.inputs import gaussian
from efficient_attn.measure.parts import parts, sums
from efficient_attn.report.error_table import show_error

SMALL = {"inputs": "gaussian", "seq_len": 24, "head_dim": 4, "norms": (0.5,), "sizes": (8,)}


class Shifted(torch.nn.Module):
    """The values with something added, which float32 rounds."""

    def forward(self, q, k, v):
        return v + torch.tensor(1 / 3, dtype=v.dtype)


def test_bias_and_spread_are_those_of_the_draws_and_rounding_that_of_float32():
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(1, 1, 5, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(400, 1, 1, 5, 3, generator=generator, dtype=torch.float64)
    v = exact.float()
    found = parts([exact + 0.5 + 0.2 * one for one in noise], exact, [Shifted()] * 400, v, v, v)
    norm = float(exact.norm())
    # Relative standard errors: spread 1/√(2·400·15) and bias 0.2/0.5/√(400·15); four of them are below 4 %.
    assert found.bias == pytest.approx(0.5 * 15**0.5 / norm, rel=0.04)
    assert found.spread == pytest.approx(0.2 * 15**0.5 / norm, rel=0.04)
    one = parts([Shifted()(v, v, v)], exact, [Shifted()], v, v, v)
    assert one.spread is None and 0 < one.rounding < torch.finfo(torch.float32).eps * 2


def test_the_parts_are_recorded_tabled_and_add_up_to_the_error():
    results = ea.mse(["performer-positive", "window"], **{**SMALL, "norms": (3.0,)}, draws=6, decompose=True)
    features, window = results.records[-2:]
    mean_square = sum(error**2 for error in features.output_relative_error_draws) / 6
    # An identity as long as the bias is not below its own noise, where it is set to 0.
    assert features.output_bias > 0
    assert features.output_bias**2 + features.output_spread**2 == pytest.approx(mean_square, rel=1e-6)
    assert window.output_spread is None and window.output_bias == pytest.approx(window.output_relative_error)
    assert features.output_rounding < 1e-5
    table = results.tables()[-1]
    assert table.columns[:5] == ("backend", "error", "bias", "spread over draws", "rounding")
    assert table.rows[0][5:] != ("", "") and table.rows[1][5:] == ("", "")
    told = [one for one in results.sentences() if one.startswith("Dividing by estimated sums")]
    ratio = features.weights_error_own_sums / features.weights_error_exact_sums
    assert f"in {int(ratio < 1)} of 1 cases (to {show_error(ratio)} to" in told[0]
    assert [row[0] for row in table.rows] == ["performer-positive(num_features=8)", "window(window=9)"]
    with pytest.raises(OptionError, match="decompose is for relative errors of the output"):
        ea.mse(["window"], **SMALL, of="weights", decompose=True)


def positive(x, w):
    return torch.exp(x @ w - x @ x / 2)


def trigonometric(x, w):
    half = torch.exp(x @ x / 2)
    return torch.stack([half * torch.cos(x @ w), half * torch.sin(x @ w)])


@pytest.mark.parametrize(
    ("name", "feature"), [("performer-positive", positive), ("performer-trig", trigonometric)]
)
def test_renormalising_is_told_on_the_same_draws_entry_by_entry(name, feature):
    q, k, _ = gaussian(norm=1.0, tokens=6, head_dim=4, num_heads=2, seed=1)
    backends = [ea.build(name, head_dim=4, num_features=8, seed=seed) for seed in (0, 1)]
    directions = [next(iter(backend.buffers())).double() for backend in backends]
    x, y = (rows.double()[0] / 4**0.25 for rows in (q, k))
    squares, size = [0.0, 0.0], 0.0
    for head in range(2):
        for i in range(6):
            kernel = torch.stack([torch.exp(x[head, i] @ y[head, j]) for j in range(6)])
            exact = kernel / kernel.sum()
            size += float(exact @ exact)
            for rows in directions:
                guess = torch.stack(
                    [
                        torch.stack(
                            [(feature(x[head, i], w) * feature(y[head, j], w)).sum() for w in rows]
                        ).mean()
                        for j in range(6)
                    ]
                )
                squares[0] += float((guess / kernel.sum() - exact).square().sum()) / 2
                squares[1] += float((guess / guess.sum() - exact).square().sum()) / 2
    found = sums(backends, q, k, scale=0.5)
    assert found == pytest.approx([(square / size) ** 0.5 for square in squares], rel=1e-9)


def test_nothing_is_told_of_sums_where_no_kernel_of_softmax_is_estimated():
    q, k, _ = gaussian(norm=1.0, tokens=6, head_dim=4)
    for name in ("window", "linear-relu"):
        assert sums([ea.build(name, head_dim=4)], q, k, scale=0.5) is None


def test_over_its_own_sums_a_kernel_gives_the_weights_of_its_backend():
    q, k, _ = (rows.double() for rows in gaussian(norm=1.0, tokens=9, head_dim=4, num_heads=4))
    k = k[:, :2]
    for name in ("performer-positive", "performer-hyperbolic", "performer-oprf", "performer-full"):
        backend = ea.build(name, head_dim=4, num_heads=4, num_features=8).double()
        if backend.needs_calibration:
            backend.calibrate(q, k)
        raw = backend.kernel_weights(q, k)
        weights = backend.attention_weights(q, k)
        torch.testing.assert_close(raw / raw.sum(dim=-1, keepdim=True), weights, rtol=1e-9, atol=1e-12)
