"""Figures about random features and low rank: verdicts follow the records in both directions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from efficient_attn.runner.records import Case, Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES
from efficient_attn.stats.verdicts import FAILS, HOLDS, NOT_MEASURABLE, Finding
from efficient_attn.studies.reproduce.figures import linformer_fig1, performer_fig2
from efficient_attn.studies.reproduce.figures.linformer_fig1 import claims as _fig1
from efficient_attn.studies.reproduce.figures.linformer_fig1 import claims as _fig1_claims
from efficient_attn.studies.reproduce.figures.performer_fig2 import claims as _fig2
from efficient_attn.studies.reproduce.figures.performer_fig2 import claims as _fig2_claims
from efficient_attn.studies.reproduce.figures.performer_fig2.claims import Place
from efficient_attn.studies.reproduce.figures.performer_fig4 import claims as _fig4_claims
from efficient_attn.studies.reproduce.figures.performer_fig4.claims import merged


def verdict(found: Sequence[Finding], words: str) -> str:
    """The verdict on the only claim with these words."""
    (one,) = [finding for finding in found if words in finding.claim]
    return one.verdict


def plane(factor: Callable[[Place, str], float] = lambda place, backend: 1.0) -> list[Record]:
    """Records of figure 2 as lemma 2 has them, with a little noise, each times a factor."""
    records = []
    for norm in performer_fig2._NORMS:
        for angle in performer_fig2._ANGLES:
            place = Place(norm, float(angle))
            for backend in (_fig2.TRIGONOMETRIC, _fig2.POSITIVE):
                case = performer_fig2.case_of(place, backend, 50_000, threads=1)
                expected = performer_fig2.expected(place, backend)
                error = expected * factor(place, backend)
                draws = tuple(error * (1 + noise / 1000) for noise in (-1, 1, -1, 1))
                measured = {"kernel_mse": error, "kernel_mse_draws": draws}
                records.append(Record(case=case, expected_kernel_mse=expected, **measured))
    return records


def test_figure_2_holds_and_turns_round_where_lemma_2_says() -> None:
    found = _fig2_claims.findings(plane())
    assert verdict(found, "lemma 2") == HOLDS
    assert verdict(found, "arbitrarily") == HOLDS
    assert verdict(found, "as many directions").startswith(
        "turns round when the angle is below 143° for vectors of length 0.25 (closed form)"
    )
    assert verdict(found, "as many features").startswith("turns round when the angle is below 131°")
    counts = [finding.measured.split(" of ")[0] for finding in found[2:]]
    utilities = _fig2.utilities(plane())
    above = [sum(one.value > level for one in utilities.values()) for level in (1.0, 0.5)]
    assert above[0] < above[1] and counts == [f"smaller at {count}" for count in above]


def test_figure_2_follows_what_is_measured() -> None:
    double = plane(lambda place, backend: 2.0 if place == Place(0.5, 90.0) else 1.0)
    assert verdict(_fig2_claims.findings(double), "lemma 2") == FAILS
    # One that sampling cannot measure decides nothing, whatever came out of it.
    hidden = plane(lambda place, backend: 2.0 if place == Place(2.0, 60.0) else 1.0)
    assert verdict(_fig2_claims.findings(hidden), "lemma 2") == HOLDS
    better = plane(lambda place, backend: 1e-6 if backend == _fig2.POSITIVE else 1.0)
    assert verdict(_fig2_claims.findings(better), "as many directions") == HOLDS
    worse = plane(lambda place, backend: 1e12 if backend == _fig2.POSITIVE else 1.0)
    assert verdict(_fig2_claims.findings(worse), "as many directions") == FAILS
    assert verdict(_fig2_claims.findings(worse), "arbitrarily") == FAILS
    assert {finding.verdict for finding in _fig2_claims.findings([])} == {NOT_MEASURABLE}


def test_the_predicted_error_of_a_measured_error_is_that_of_its_fourth_moment() -> None:
    generator = np.random.default_rng(0)
    for square, backend in ((0.3, _fig2.POSITIVE), (0.3, _fig2.TRIGONOMETRIC), (4.0, _fig2.TRIGONOMETRIC)):
        normal = generator.standard_normal(400_000) * math.sqrt(square)
        sample = np.exp(normal) if backend == _fig2.POSITIVE else np.cos(normal)
        squares = (sample - sample.mean()) ** 2
        # |x + y|² at 0° is 4 l², and so is |x − y|² at 180°.
        place = Place(math.sqrt(square) / 2, 0.0 if backend == _fig2.POSITIVE else 180.0)
        predicted = _fig2.predicted_error(place, backend, 1)
        blocks = (squares.reshape(20, -1).std(axis=1) / squares.reshape(20, -1).mean(axis=1)).tolist()
        error = np.std(blocks, ddof=1) / math.sqrt(len(blocks))
        assert abs(np.mean(blocks) - predicted) < 4.5 * error


def test_the_turning_angle_is_where_the_measured_ratio_passes() -> None:
    found = _fig2.utilities(plane())
    for norm in (0.25, 0.5, 0.75):
        measured = _fig2.measured_turning_angle(found, norm, 1.0)
        # The logarithm is nearly a straight line between angles at most 15° apart.
        assert measured == pytest.approx(_fig2.turning_angle(norm, 1.0), abs=1)
    assert _fig2.measured_turning_angle(found, 2.0, 1.0) is None


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

    found = _fig4_claims.findings(output_errors(claimed))
    assert [finding.verdict for finding in found] == [HOLDS] * 8
    opposite = output_errors(lambda *place: 1 / claimed(*place), mean=lambda norm: 1e-3)
    assert [finding.verdict for finding in _fig4_claims.findings(opposite)] == [FAILS] * 8
    assert {finding.verdict for finding in _fig4_claims.findings([])} == {NOT_MEASURABLE}


def test_figure_4_tells_the_norm_at_which_a_claim_turns_round() -> None:
    def crossing(backend: str, projection: str, size: int, norm: float) -> float:
        # From ½ to 4 between norms ½ and 1, a third of the way to 1 in logarithms.
        return {0.5: 0.5, 1.0: 4.0, 2.0: 5.0}[norm] if backend == "performer-trig" else 1.0

    found = _fig4_claims.findings(output_errors(crossing, mean=lambda norm: (0.7 / norm) ** 2))
    assert verdict(found, "trigonometric ones, iid") == "turns round when the norm is below about 0.63"
    assert verdict(found, "mean of V, positive") == "turns round when the norm is above about 0.70"
    # Equal errors are no evidence for either side.
    same = verdict(found, "iid ones, positive")
    assert same == f"{NOT_MEASURABLE}: no difference beyond noise at norm 0.5, 1, 2"
    # Nor are errors that are larger in half of the samples and smaller in the others.
    noisy = [
        replace(record, output_mse_draws=tuple(1.0 + (-0.5) ** (1 + sample % 2) for sample in range(15)))
        if record.case.options.get("projection") == "iid"
        else record
        for record in output_errors(crossing)
    ]
    assert verdict(_fig4_claims.findings(noisy), "iid ones, positive") == same


def heads(decay: Callable[[_fig1.Head], float], *, shuffled: float = 0.99, texts: int = 4) -> list[Record]:
    """Records of figure 1 whose singular values fall by these factors."""
    made = []
    for layer, text in linformer_fig1._PLACES:
        for number in range(12):
            head = _fig1.Head(text, layer, number)
            for matrix, factor in ((_fig1.REAL, decay(head)), (_fig1.SHUFFLED, shuffled)):
                if matrix == _fig1.REAL or text == 0:
                    values = tuple(factor**index for index in range(64))
                    made.append(
                        Record(case=linformer_fig1.case_of(head, matrix, 64, 1), singular_values=values)
                    )
    return made


def test_figure_1_holds_for_spectra_that_fall_faster_in_higher_layers() -> None:
    found = _fig1_claims.findings(heads(lambda head: 0.7 - 0.05 * head.layer + 0.001 * head.head))
    assert [finding.verdict for finding in found] == [HOLDS] * 4
    assert {finding.verdict for finding in _fig1_claims.findings([])} == {NOT_MEASURABLE}


def test_figure_1_fails_for_flat_spectra_and_names_single_heads() -> None:
    flat = _fig1_claims.findings(heads(lambda head: 0.995 + 0.0005 * head.layer, shuffled=0.5))
    assert verdict(flat, "Most of") == verdict(flat, "more skewed") == FAILS
    assert verdict(flat, "10 %") == verdict(flat, "flat") == FAILS
    one = _fig1_claims.findings(heads(lambda head: 0.999 if head[1:] == (1, 8) else 0.7))
    assert (
        verdict(one, "Most of") == "turns round when it is head 8 of layer 1 (4 texts), of 72 heads and texts"
    )
    # Layers without a difference leave the question open.
    assert verdict(one, "more skewed") == NOT_MEASURABLE


def test_shares_and_errors_are_those_of_singular_values() -> None:
    values = np.array([3.0, 1.0, 0.0, 0.0])
    assert _fig1.share(values) == 0.75 and _fig1.index_of(values) == 1
    assert _fig1.least_error(values) == pytest.approx(math.sqrt(1 / 10))
    assert _fig1.needed(values) == 2 and _fig1.needed(values, 0.7) == 1


def test_measured_singular_values_are_those_of_the_shipped_attention() -> None:
    from efficient_attn.measure.inputs import sample

    record = linformer_fig1._measured(linformer_fig1.case_of(_fig1.Head(0, 5, 3), _fig1.REAL, 32, 1))
    q, k, _ = (tensor[0, 3, :32].double().numpy() for tensor in sample(layer=5))
    weights = np.exp(q @ k.T / math.sqrt(32))
    weights /= weights.sum(axis=1, keepdims=True)
    wanted = np.linalg.svd(weights, compute_uv=False)
    # Kept to five digits: half a unit of the last is at most 5e-5 of a value.
    np.testing.assert_allclose(record.singular_values or (), wanted, rtol=5.01e-5, atol=1e-14)


def test_figure_4_merges_the_records_of_samples_and_drops_samples_that_lack_a_line() -> None:
    def record(label: str, seed: int, error: float | None) -> Record:
        case = Case(
            kind="error", backend=label, label=label, of="output", num_heads=1, head_dim=16, tokens=64,
            dtype="float32", device="cpu", threads=1, inputs="gaussian(norm=0.5)", seed=seed,
        )  # fmt: skip
        if error is None:
            return Record(case=case, status="skipped", reason="no time")
        return Record(case=case, output_mse=error, output_mse_draws=(error,))

    records = [record("one", 0, 1.0), record("two", 0, 2.0), record("one", 1, 3.0), record("two", 1, None)]
    one, two, never = merged([*records, record("never", 0, None)])
    assert (one.case.inputs, one.output_mse_draws) == ("gaussians(norm=0.5)", (1.0,))
    assert (two.output_mse_draws, never.status, never.reason) == ((2.0,), "skipped", "no time")
    assert merged([one, two, never]) == [one, two, never]
