"""Where an error comes from: bias, spread over draws, rounding."""

import pytest
import torch

import efficient_attn as ea
from efficient_attn.errors import OptionError
from efficient_attn.measure.parts import parts

SMALL = {"inputs": "gaussian", "tokens": 24, "head_dim": 4, "norms": (0.5,), "sizes": (8,)}


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
    assert table.columns == ("backend", "error", "bias", "spread over draws", "rounding")
    assert [row[0] for row in table.rows] == ["performer-positive(num_features=8)", "window(window=9)"]
    with pytest.raises(OptionError, match="decompose is for relative errors of the output"):
        ea.mse(["window"], **SMALL, of="weights", decompose=True)
