"""What tables, plots and sentences make of errors size by size."""

import pytest
from synthetic_records import case

import efficient_attn as ea
from efficient_attn.measure.record import Record, replace
from efficient_attn.measure.variants import UNIFORM_ATTENTION, Sized, sized
from efficient_attn.studies.mse.view import below_from, panels

DRAWS = "output_relative_error_draws"


def record(label, error, *, inputs="encoder(layer=0)", options=None, **measured):
    about = {"options": options or {}, "of": "output", "inputs": inputs}
    draws = {"output_relative_error": error, "output_relative_error_draws": (error,)}
    return Record(case=case("error", label, 24, **about), **draws, **measured)


def made_up(positive, trig, window, yardstick, **more):
    """Records of two sizes for three backends and the yardstick."""
    errors = {
        ("performer-positive", "num_features", 0): positive,
        ("performer-trig", "num_features", 0): trig,
        ("window", "window", 1): window,
    }
    made = [record(UNIFORM_ATTENTION, yardstick, **more)]
    for (backend, option, odd), pair in errors.items():
        for size, error in zip((16 + odd, 32 + odd), pair, strict=True):
            made.append(record(f"{backend}({option}={size})", error, options={option: size}, **more))
    return made


@pytest.mark.parametrize(
    ("label", "options", "expected"),
    [
        ("exact", {}, Sized("exact", None)),
        ("f(init=x, rank=8)", {"init": "x", "rank": 8}, Sized("f(init=x)", 8)),
        ("f(rank=8, seed=3)", {"rank": 8, "seed": 3}, Sized("f(seed=3)", 8)),
        ("strange(n=8)", {}, Sized("strange(n=8)", None)),
        ("f(rank=8, init=x)", {"init": "x", "rank": 8}, Sized("f(init=x)", 8)),
        ("f(8=seed)", {}, Sized("f(8=seed)", None)),
    ],
)
def test_a_label_tells_its_size(label, options, expected):
    assert sized(record(label, 0.5, options=options).case) == expected


def test_a_curve_is_below_the_yardstick_from_the_size_after_which_it_stays_there():
    shown = made_up((0.9, 0.3), (0.2, 0.9), (0.2, 0.1), 0.5)
    # Of equal cases the last one counts.
    shown = [*made_up((0.1, 0.1), (0.1, 0.1), (0.1, 0.1), 0.5), *shown]
    curves = panels(shown, "output_relative_error")[0].curves
    assert [below_from(curve, 0.5) for curve in curves.values()] == [32, None, 17]


def test_the_sentences_are_computed_from_the_rows():
    real = [
        *made_up((0.9, 0.8), (9.0, 8.0), (0.9, 0.1), 0.5),
        *made_up((0.9, 0.4), (9.0, 8.0), (0.2, 0.1), 0.5, inputs="encoder(layer=1)"),
    ]
    drawn = made_up((0.9, 0.8), (0.7, 0.9), (0.9, 0.9), 0.5, inputs="gaussian(norm=0.5)")
    words = "Below uniform attention everywhere, with fewer operations than exact: window from size 33"
    counted = [replace(record, flops=1) for record in (*drawn, *real)]
    assert ea.Results(counted).sentences() == [f"{words}."]
    # Backends of users need not declare their operations.
    assert ea.Results([*drawn, *real]).sentences() == [f"{words} (operations not counted)."]


def test_a_size_counts_as_useful_once_its_interval_is_below_uniform_attention():
    yardstick = record(UNIFORM_ATTENTION, 0.5, flops=1)
    label, everywhere = "performer(num_features={})", "Below uniform attention everywhere"
    wide, narrow = (
        replace(record(label.format(size), 0.4, options={"num_features": size}, flops=1), **{DRAWS: draws})
        for size, draws in ((16, (0.3, 0.4, 0.6)), (32, (0.3, 0.4, 0.45)))
    )
    decided = f"{everywhere}, with fewer operations than exact: performer from size 32."
    assert ea.Results([yardstick, wide, narrow]).sentences() == [decided]
    open_ = f"{everywhere}, not decided with 3 draws (try --draws 12): performer."
    assert ea.Results([yardstick, wide]).sentences() == [open_]
    # A median above uniform attention does not decide either.
    above = replace(wide, **{DRAWS: (0.4, 0.55, 0.6)})
    assert ea.Results([yardstick, above]).sentences() == [open_]


def test_sizes_that_save_no_operations_are_not_counted_as_useful():
    small, large = (
        record(f"window(window={size})", 0.1, options={"window": size}, flops=flops)
        for size, flops in ((5, 10**3), (47, 10**9))
    )
    yardstick = record(UNIFORM_ATTENTION, 0.5)
    assert ea.Results([yardstick, small, large]).sentences()[-1].endswith(": window from size 5.")
    nothing = "No backend beats uniform attention on every input with fewer operations than exact."
    assert ea.Results([yardstick, large]).sentences() == [nothing]


def test_a_line_ends_with_a_mark_where_it_becomes_exact_and_has_an_arrow_beyond_six_decades():
    shown = [
        *made_up((1e9, 2e9), (0.3, 0.2), (0.1, 1e-9), 0.5),
        # Sizes beyond an exact one are left out.
        record("window(window=65)", 1e-9, options={"window": 65}),
    ]
    (chart,) = ea.Results(shown).plots()["error"].charts
    bottom, top = chart.y.limits
    assert top < 1e6 * bottom * 3 and bottom < 0.1
    marks = {line.style["marker"]: line for line in chart.series if not line.label}
    assert marks["^"].y == [top, top] and marks["^"].x == [16, 32]
    assert (marks["o"].x, marks["o"].y) == ([33], [bottom])
    assert next(line for line in chart.series if line.label == "window").x == [17, 33]


def test_the_table_of_relative_errors_has_the_mean_squared_error_of_the_largest_size():
    records = [replace(x, output_mse=x.output_relative_error**2 / 4) for x in made_up(*[(0.9, 0.4)] * 3, 0.6)]
    (table,) = ea.Results(records).tables()
    assert table.columns[-1] == "MSE, largest size"
    assert [row[-1] for row in table.rows] == ["0.09", "0.04", "0.04", "0.04"]
