"""Numbers on the page on errors are those of its plots."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).parent.parent / "docs"
PAGE = " ".join((DOCS / "errors.md").read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def lessons() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "lessons.py"))


def test_the_gradient_of_a_row_is_the_norm_of_the_jacobian_of_softmax(lessons: dict[str, Any]) -> None:
    row = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    jacobian = torch.autograd.functional.jacobian(lambda scores: scores.softmax(dim=-1), row)
    torch.testing.assert_close(lessons["sensitivity"](row.softmax(dim=-1)), jacobian.norm())


def test_dividing_by_the_root_of_the_dimension_makes_the_variance_of_scores_one(
    lessons: dict[str, Any],
) -> None:
    for dim in (16, 64):
        for scaled, wanted in ((True, 1.0), (False, dim)):
            value, error = lessons["scores"](dim, scaled=scaled).variance
            # Of eight draws the standard error itself is uncertain by a quarter.
            assert abs(value - wanted) < 6 * error


def test_lengths_are_those_of_sums_of_scaled_vectors(lessons: dict[str, Any]) -> None:
    q, k = torch.randn(2, 1, 1, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sums = (q[..., :, None, :] + k[..., None, :, :]) / 16**0.25
    torch.testing.assert_close(lessons["lengths"](q, k), sums.square().sum(dim=-1))


@pytest.mark.slow
def test_the_numbers_on_the_page_are_those_that_are_drawn(lessons: dict[str, Any]) -> None:
    means = [f"{lessons['mean_error'](layer):.2f}" for layer in lessons["LAYERS"]]
    assert f"that of uniform attention {means[0]}, {means[1]} and {means[2]}." in PAGE
    errors = [f"{lessons['errors_on'](layer, 'performer-positive', 256)[0]:.2f}" for layer in (0, 1, 5)]
    assert f"the relative error is {errors[0]}, {errors[1]} and {errors[2]}," in PAGE
    divided, undivided = (lessons["scores"](64, scaled=scaled) for scaled in (True, False))
    assert f"{divided.entropy[0]:.2f} nats" in PAGE and f"{undivided.entropy[0]:.2f} at d = 64" in PAGE
    assert f"({undivided.gradient[0]:.2f} against {divided.gradient[0]:.2f})" in PAGE
