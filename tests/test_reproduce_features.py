"""Figures about random features and low rank: verdicts follow the records in both directions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from efficient_attn.runner.records import Case, Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES
from efficient_attn.stats.verdicts import FAILS, HOLDS, NOT_MEASURABLE, Finding
from efficient_attn.studies.reproduce.figures import linformer_fig1, performer_fig2, performer_fig4
from efficient_attn.theory.kernel import (
    log_mean_squared_error,
    log_positive_error,
    log_trigonometric_error,
)


def verdict(found: Sequence[Finding], words: str) -> str:
    """The verdict on the only claim with these words."""
    (one,) = [finding for finding in found if words in finding.claim]
    return one.verdict


def plane(factor: Callable[[float, float, str], float] = lambda norm, angle, backend: 1.0) -> list[Record]:
    """Records of figure 2 as lemma 2 has them, with a little noise, each times a factor."""
    records = []
    for norm, angle, backend in product(
        performer_fig2._NORMS, performer_fig2._ANGLES, performer_fig2._BACKENDS
    ):
        case = Case(
            kind="error", backend=backend, label=f"{backend}(projection=iid, num_features=1)",
            options={"projection": "iid", "num_features": 1},
            of="kernel", num_heads=1, head_dim=16, tokens=1, dtype="float64", device="cpu", threads=1,
            inputs=f"pair(norm={norm:g}, angle={angle:g})",
        )  # fmt: skip
        half, inner = math.radians(angle) / 2, norm**2 * math.cos(math.radians(angle))
        if backend == "performer-positive":
            log_error = log_positive_error(4 * norm**2 * math.cos(half) ** 2 * (angle != 180))
        else:
            log_error = log_trigonometric_error(4 * norm**2 * math.sin(half) ** 2)
        expected = float(np.exp(log_mean_squared_error(log_error, inner)))
        error = expected * factor(norm, angle, backend)
        draws = tuple(error * (1 + noise / 1000) for noise in (-1, 1, -1, 1))
        measured = {"kernel_mse": error, "kernel_mse_draws": draws, "kernel_value": math.exp(inner)}
        records.append(Record(case=case, expected_kernel_mse=expected, num_directions=1, **measured))
    return records


def test_figure_2_holds_and_turns_round_where_lemma_2_says() -> None:
    found = performer_fig2.findings(plane())
    assert verdict(found, "lemma 2") == HOLDS
    assert verdict(found, "arbitrarily") == HOLDS
    assert verdict(found, "as many directions").startswith(
        "turns round when the angle is at most 135° for vectors of length 0.25, 1"
    )
    assert verdict(found, "as many features").startswith("turns round when the angle is at most 120°")
    counts = [finding.measured.split(" of ")[0] for finding in found[2:]]
    utilities = performer_fig2.utilities(plane())
    above = [sum(one.median > level for one in utilities.values()) for level in (1.0, 0.5)]
    assert above[0] < above[1] and counts == [f"smaller at {count}" for count in above]


def test_figure_2_follows_what_is_measured() -> None:
    double = plane(lambda norm, angle, backend: 2.0 if (norm, angle) == (0.5, 90) else 1.0)
    assert verdict(performer_fig2.findings(double), "lemma 2") == FAILS
    # An error that sampling cannot measure decides nothing.
    hidden = [
        replace(record, status="skipped", reason="too few", kernel_mse=None, kernel_mse_draws=None)
        if record.case.inputs == "pair(norm=0.5, angle=90)"
        else record
        for record in double
    ]
    assert verdict(performer_fig2.findings(hidden), "lemma 2") == HOLDS
    assert (0.5, 90) not in performer_fig2.utilities(hidden)
    better = plane(lambda norm, angle, backend: 1e-12 if backend == "performer-positive" else 1.0)
    assert verdict(performer_fig2.findings(better), "as many directions") == HOLDS
    worse = plane(lambda norm, angle, backend: 1e12 if backend == "performer-positive" else 1.0)
    assert verdict(performer_fig2.findings(worse), "as many directions") == FAILS
    assert verdict(performer_fig2.findings(worse), "arbitrarily") == FAILS
    assert {finding.verdict for finding in performer_fig2.findings([])} == {NOT_MEASURABLE}


def test_former_errors_of_single_directions_count_where_they_could_be_sampled() -> None:
    former = [
        replace(record, case=replace(record.case, options={"projection": "iid", "directions": 10**6}))
        for record in plane()
    ]
    found = performer_fig2.utilities(former)
    assert (0.5, 90) in found and (2.0, 175) in found and (2.0, 30) not in found
    assert len(found) < len(performer_fig2.utilities(plane()))
    assert "– (" in performer_fig2.tables(former)[0].rows[-1][1]


def output_errors(
    error: Callable[[str, str, int, float], float], *, mean: Callable[[float], float] = lambda norm: 1.0
) -> list[Record]:
    """Records of figure 4 with these errors of (backend, projection, size, norm), and a little noise."""

    def record(norm: float, backend: str, value: float, **options: str | int) -> Record:
        inner = ", ".join(f"{name}={option}" for name, option in options.items())
        case = Case(
            kind="error",
            backend=backend,
            label=f"{backend}({inner})" if inner else backend,
            options=options,
            of="output",
            num_heads=1,
            head_dim=16,
            tokens=4096,
            dtype="float32",
            device="cpu",
            threads=1,
            inputs=f"gaussians(norm={norm:g})",
        )
        draws = tuple(value * (1 + sample / 1000) for sample in range(15))
        return Record(case=case, output_mse=value, output_mse_draws=draws)

    made = []
    for norm in (0.5, 1.0, 2.0):
        made.append(record(norm, MEAN_OF_VALUES, mean(norm)))
        for backend in ("performer-positive", "performer-trig"):
            for projection in ("orthogonal", "iid"):
                made += [
                    record(
                        norm,
                        backend,
                        error(backend, projection, size, norm),
                        projection=projection,
                        num_features=size,
                    )
                    for size in (16, 64)
                ]
    return made


def test_figure_4_holds_where_the_errors_are_as_claimed_and_fails_where_they_are_not() -> None:
    def claimed(backend: str, projection: str, size: int, norm: float) -> float:
        return (2.0 if backend == "performer-trig" else 1.0) * (1.5 if projection == "iid" else 1.0) / size

    found = performer_fig4.findings(output_errors(claimed))
    assert [finding.verdict for finding in found] == [HOLDS] * 8
    # Every sample has inputs of its own.
    assert "±: median of 15 seeds of the inputs" in performer_fig4.tables(output_errors(claimed))[0].notes[0]
    opposite = output_errors(lambda *place: 1 / claimed(*place), mean=lambda norm: 1e-3)
    assert [finding.verdict for finding in performer_fig4.findings(opposite)] == [FAILS] * 8
    assert {finding.verdict for finding in performer_fig4.findings([])} == {NOT_MEASURABLE}


def test_figure_4_tells_the_norm_at_which_a_claim_turns_round() -> None:
    def crossing(backend: str, projection: str, size: int, norm: float) -> float:
        # From ½ to 4 between norms ½ and 1, a third of the way to 1 in logarithms.
        return {0.5: 0.5, 1.0: 4.0, 2.0: 5.0}[norm] if backend == "performer-trig" else 1.0

    found = performer_fig4.findings(output_errors(crossing, mean=lambda norm: (0.7 / norm) ** 2))
    assert verdict(found, "trigonometric ones, iid") == "turns round when norm 0.5"
    assert verdict(found, "mean of V, positive") == "turns round when norm 1; norm 2"
    # Equal errors are no evidence for either side.
    same = verdict(found, "iid ones, positive")
    assert same == NOT_MEASURABLE
    # Nor are errors that are larger in half of the samples and smaller in the others.
    noisy = [
        replace(record, output_mse_draws=tuple(1.0 + (-0.5) ** (1 + sample % 2) for sample in range(15)))
        if record.case.options.get("projection") == "iid"
        else record
        for record in output_errors(crossing)
    ]
    assert verdict(performer_fig4.findings(noisy), "iid ones, positive") == same


def heads(decay: Callable[[int, int], float]) -> list[Record]:
    """Records of figure 1 whose singular values fall by these factors of layer and head."""
    return [
        Record(
            case=linformer_fig1.case_of(layer, head, 64, 1),
            singular_values=tuple(decay(layer, head) ** index for index in range(64)),
        )
        for layer in linformer_fig1._LAYERS
        for head in range(12)
    ]


def test_figure_1_holds_for_spectra_that_fall_faster_in_higher_layers() -> None:
    found = linformer_fig1.findings(heads(lambda layer, head: 0.7 - 0.05 * layer + 0.001 * head))
    assert [finding.verdict for finding in found] == [HOLDS] * 3
    assert {finding.verdict for finding in linformer_fig1.findings([])} == {NOT_MEASURABLE}


def test_figure_1_fails_for_flat_spectra_and_names_single_heads_and_layers() -> None:
    flat = linformer_fig1.findings(heads(lambda layer, head: 0.995 + 0.0005 * layer))
    assert [finding.verdict for finding in flat] == [FAILS] * 3
    one = linformer_fig1.findings(heads(lambda layer, head: 0.999 if (layer, head) == (1, 8) else 0.7))
    assert verdict(one, "Most of") == "turns round when head 8 of layer 1"
    lower = linformer_fig1.findings(heads(lambda layer, head: {0: 0.6, 1: 0.7, 5: 0.5}[layer]))
    assert verdict(lower, "more skewed") == "turns round when layer 1 is compared with 0"


def test_layers_are_not_ordered_where_intervals_of_their_medians_overlap() -> None:
    scattered = {0: 0.5, 1: 0.55, 5: 0.3}
    found = linformer_fig1.findings(heads(lambda layer, head: scattered[layer] + 0.02 * head))
    assert verdict(found, "more skewed") == f"{HOLDS}; too noisy to tell at layer 1 is compared with 0"


def test_shares_and_errors_are_those_of_singular_values() -> None:
    values = np.array([3.0, 1.0, 0.0, 0.0])
    assert linformer_fig1.share(values) == 0.75 and linformer_fig1.index_of(values) == 1
    assert linformer_fig1.least_error(values) == pytest.approx(math.sqrt(1 / 10))


def test_measured_singular_values_are_those_of_the_shipped_attention() -> None:
    from efficient_attn.measure.inputs import sample

    record = linformer_fig1._measured(linformer_fig1.case_of(5, 3, 32, 1))
    q, k, _ = (tensor[0, 3, :32].double().numpy() for tensor in sample(layer=5))
    weights = np.exp(q @ k.T / math.sqrt(32))
    weights /= weights.sum(axis=1, keepdims=True)
    wanted = np.linalg.svd(weights, compute_uv=False)
    # Kept to five digits: half a unit of the last is at most 5e-5 of a value.
    np.testing.assert_allclose(record.singular_values or (), wanted, rtol=5.01e-5, atol=1e-14)


def test_figure_4_takes_ratios_over_the_samples_that_all_lines_have() -> None:
    def record(backend: str, seed: int, error: float | None) -> Record:
        case = Case(
            kind="error", backend=backend, label=f"{backend}(projection=iid, num_features=8)", of="output",
            options={"projection": "iid", "num_features": 8}, num_heads=1, head_dim=16, tokens=64,
            dtype="float32", device="cpu", threads=1, inputs="gaussian(norm=0.5)", seed=seed,
        )  # fmt: skip
        if error is None:
            return Record(case=case, status="skipped", reason="no time")
        return Record(case=case, output_mse=error, output_mse_draws=(error,))

    trig, positive = performer_fig4._TRIGONOMETRIC, performer_fig4._POSITIVE
    records = [
        record(trig, 0, 2.0),
        record(positive, 0, 1.0),
        record(trig, 1, 9.0),
        record(positive, 1, None),
    ]
    found = performer_fig4.samples_of(records)
    above, below = (performer_fig4.Line(name, "iid", 8) for name in (trig, positive))
    assert found == {0.5: {above: {0: 2.0, 1: 9.0}, below: {0: 1.0}}}
    measured = performer_fig4._judged(found, "", above, below).measured
    assert "2 (2 to 2) at norm 0.5" in measured and measured.endswith("of 1")
