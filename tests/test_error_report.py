"""What tables, plots and sentences make of errors size by size."""

import math

import pytest

import efficient_attn as ea
from efficient_attn.measure.record import Case, Record, replace
from efficient_attn.measure.variants import UNIFORM_ATTENTION, Sized, Variant, sized, with_size
from efficient_attn.studies.mse.analysis import below_from, panels

QUANTITY = "output_relative_error"


def record(label, error, *, inputs="encoder(layer=0)", options=None, **more):
    case = Case(
        kind="error",
        backend=label.partition("(")[0],
        label=label,
        options=options or {},
        of="output",
        num_heads=1,
        head_dim=4,
        tokens=24,
        dtype="float32",
        device="cpu",
        threads=1,
        inputs=inputs,
    )
    draws = error if isinstance(error, tuple) else (error,)
    return Record(
        case=case, output_relative_error=sum(draws) / len(draws), output_relative_error_draws=draws, **more
    )


def made_up(positive, trig, window, yardstick, **more):
    """Records of two sizes for three backends and the yardstick."""
    named = {"performer-positive": ("num_features", positive), "performer-trig": ("num_features", trig)}
    named["window"] = ("window", window)
    made = [record(UNIFORM_ATTENTION, yardstick, **more)]
    for backend, (option, errors) in named.items():
        seed = {"seed": 0} if option == "num_features" else {}
        for size, error in zip((16, 32), errors, strict=True):
            options = {option: size + (option == "window"), **seed}
            made.append(record(f"{backend}({option}={options[option]})", error, options=options, **more))
    return made


@pytest.mark.parametrize(
    ("label", "options", "expected"),
    [
        ("exact", {}, Sized("exact", None)),
        ("f(rank=8)", {"rank": 8}, Sized("f", 8)),
        ("f(init=x, rank=8)", {"init": "x", "rank": 8}, Sized("f(init=x)", 8)),
        ("f(rank=8, seed=3)", {"rank": 8, "seed": 3}, Sized("f(seed=3)", 8)),
        ("f(seed=3)", {"seed": 3}, Sized("f(seed=3)", None)),
        ("strange(n=8)", {}, Sized("strange(n=8)", None)),
    ],
)
def test_a_label_tells_its_size(label, options, expected):
    assert sized(record(label, 0.5, options=options).case) == expected


def test_a_size_given_to_a_variant_is_read_back_from_its_label():
    variant = with_size(
        Variant(backend="f", label="f(init=x)", target=None, options={"init": "x"}), "rank", 8
    )
    assert (variant.label, variant.options) == ("f(init=x, rank=8)", {"init": "x", "rank": 8})


def test_a_curve_is_below_the_yardstick_from_the_size_after_which_it_stays_there():
    shown = made_up((0.9, 0.3), (0.2, 0.9), (0.2, 0.1), 0.5)
    positive, trig, window = panels(shown, QUANTITY)[0].curves
    assert [below_from(curve, 0.5) for curve in (positive, trig, window)] == [32, None, 17]


def test_of_equal_cases_the_last_one_counts():
    (panel,) = panels([record("exact", 0.5), record("exact", 0.25)], QUANTITY)
    assert [point.value for point in panel.curves[0].points] == [0.25]


def test_the_sentences_are_computed_from_the_rows():
    real = [
        *made_up((0.9, 0.8), (9.0, 8.0), (0.9, 0.1), 0.5),
        *made_up((0.9, 0.4), (9.0, 8.0), (0.2, 0.1), 0.5, inputs="encoder(layer=1)"),
    ]
    drawn = made_up((0.9, 0.8), (0.7, 0.9), (0.9, 0.9), 0.5, inputs="gaussian(norm=0.5)")
    words = "Below uniform attention on every input, with fewer operations than exact: window from size 33"
    counted = [replace(one, flops=1) for one in (*drawn, *real)]
    assert ea.Results(counted).sentences() == [f"{words}."]
    # Backends of users need not declare their operations.
    assert ea.Results([*drawn, *real]).sentences() == [f"{words} (operations not counted)."]


def featured(norm, size=64):
    name = f"performer-positive(num_features={size})"
    shown = [record(UNIFORM_ATTENTION, 0.5), record(name, 0.9, options={"num_features": size, "seed": 0})]
    return ea.Results(shown, environment={"pair_norms": {"encoder(layer=0)": norm}}).sentences()


def test_the_reason_for_the_errors_of_random_features_follows_from_the_measured_norms():
    (reason,) = (one for one in featured(8.0) if one.startswith("Random features"))
    scatter = ((math.exp(8.0) - 1) / 64) ** 0.5
    assert reason.endswith(f"encoder, layer 0: |x+y|² 8, 64 features, {scatter:.2g}.")


@pytest.mark.parametrize("norm", ["large", None, True, -1.0, 2000.0, 1e999, [1]])
def test_a_strangers_norm_gives_no_reason(norm):
    assert not any(one.startswith("Random features") for one in featured(norm))


def test_sizes_that_save_no_operations_are_not_counted_as_useful():
    shown = [
        record(f"window(window={size})", 0.1, options={"window": size}, flops=flops)
        for size, flops in ((5, 10**3), (47, 10**9))
    ]
    useful = ea.Results([record(UNIFORM_ATTENTION, 0.5), *shown]).sentences()[-1]
    assert useful.endswith(": window from size 5.")
    wasteful = ea.Results([record(UNIFORM_ATTENTION, 0.5), shown[1]]).sentences()[-1]
    assert wasteful.endswith(": nothing measured here.")
