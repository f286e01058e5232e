"""Quantities of records as data: name, unit, meaning, type, and the comparison of two runs by them.

A study declares its quantities with `declare_quantities`. The fields of records, the reader, the JSON Schema,
the reference table, `diff` and the names of `--fail-on` follow from the declarations.
"""

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal, NamedTuple

Better = Literal["less", "more"]
Scatter = Literal["rounds", "draws", "seeds"]
Type = Literal[
    "number", "signed number", "whole number", "numbers", "signed numbers", "whole numbers", "text"
]

# Relative change of a scattering number that matters unless --fail-on names another.
MATTERS = 0.05


class Field(NamedTuple):
    """Field of a record that holds a quantity or its samples."""

    name: str
    type: Type
    unit: str
    meaning: str


@dataclass(frozen=True)
class Quantity:
    """A measured value, and the way in which two runs are compared by it.

    Attributes:
        name: Name in tables, in JSON and of --fail-on.
        meaning: Definition that begins with a noun.
        better: Direction of an improvement, or None.
        scatter: Repetitions over which the value varies randomly. None: a case reproduces it exactly.
        threshold: Relative change that matters.
        record_field: Field of a record; omitted: the name.
        samples: Field of the raw values, one per repetition; None: records keep none.
        rounding: Values below this power of the precision of the dtype are rounding errors.
            0: never.
        compared: Whether runs are compared by it. False: the field describes a condition.
    """

    name: str
    unit: str
    meaning: str
    _: KW_ONLY
    type: Type = "number"
    better: Better | None = "less"
    scatter: Scatter | None = None
    threshold: float = 0.0
    record_field: str | None = None
    samples: str | None = None
    rounding: int = 0
    compared: bool = True

    @property
    def field(self) -> str:
        """Field of a record that holds the value."""
        return self.record_field or self.name

    @property
    def fields(self) -> Iterator[Field]:
        """Fields of a record for the value and for its samples."""
        yield Field(self.field, self.type, self.unit, self.meaning)
        if self.samples not in (None, self.field):
            repetition = f"{self.scatter}".removesuffix("s")
            meaning = f"Values of {self.field}, one per {repetition}."
            samples: Type = "signed numbers" if self.type == "signed number" else "numbers"
            yield Field(f"{self.samples}", samples, self.unit, meaning)


# Declared so far: compared quantities and conditions by name, fields and kinds of records.
QUANTITIES: dict[str, Quantity] = {}
CONDITIONS: dict[str, Quantity] = {}
FIELDS: dict[str, Field] = {}
KINDS: dict[str, str] = {}


def declare_quantities(*quantities: Quantity, kinds: Mapping[str, str] | None = None) -> None:
    """Declare quantities, and kinds of records with their meaning."""
    for quantity in quantities:
        (QUANTITIES if quantity.compared else CONDITIONS)[quantity.name] = quantity
        FIELDS.update({field.name: field for field in quantity.fields})
    KINDS.update(kinds or {})


def cost(name: str, unit: str, meaning: str) -> Quantity:
    """Whole number that its case reproduces. Less is better."""
    return Quantity(name, unit, meaning, type="whole number")


def error(name: str, unit: str, meaning: str, *, rounding: int = 1) -> Quantity:
    """Error with one value per draw, kept in `NAME_draws`."""
    draws = f"{name}_draws"
    return Quantity(name, unit, meaning, scatter="draws", threshold=MATTERS, samples=draws, rounding=rounding)


def setting(
    name: str, unit: str, meaning: str, *, type: Type = "whole number", threshold: float = 1e-9
) -> Quantity:
    """Value that describes the measurement or follows from theory. A change is neither better nor worse."""
    return Quantity(name, unit, meaning, type=type, better=None, threshold=threshold)


def condition(name: str, unit: str, meaning: str, *, type: Type = "number") -> Quantity:
    """Field that is not compared."""
    return Quantity(name, unit, meaning, type=type, better=None, compared=False)


# Costs: `bench`.
declare_quantities(
    *(
        Quantity(
            name,
            "s",
            f"{meaning}, one entry per timed call, in order.",
            type="numbers",
            scatter="rounds",
            threshold=MATTERS,
            record_field=samples,
            samples=samples,
        )
        for name, samples, meaning in (
            ("time_s", "times_s", "Wall-clock time of a call; on one CPU thread its processor time"),
            ("device_time_s", "device_times_s", "Time of a queued call on a GPU without launch overhead"),
        )
    ),
    condition(
        "round_sizes", "", "Number of timed calls in each interleaved round, in order.", type="whole numbers"
    ),
    condition(
        "kernels",
        "",
        "Kernels of the calls: cpu (algorithms for its caches), flex, varlen, torch (PyTorch's operators).",
        type="text",
    ),
    cost("peak_bytes", "bytes", "Peak of allocated memory above the level before the call."),
    cost("parameter_bytes", "bytes", "Size of the parameters of the backend."),
    cost("state_bytes", "bytes", "Size of the streaming state of a causal backend after all tokens."),
    cost("flops", "FLOP", "Floating-point operations of the matrix products of a call."),
    setting(
        "calibrated_on",
        "",
        "Inputs of the calibration of data-dependent parameters; null: none, or an earlier calibration.",
        type="text",
    ),
    cost("floats_read", "", "Number of floats that a query reads per head: keys and values, or a state."),
    kinds={"time": "wall-clock time", "memory": "peak memory"},
)

# Accuracy of trained models: `recall`.
declare_quantities(
    Quantity(
        "accuracy",
        "share",
        "Share of right answers after training.",
        better="more",
        scatter="seeds",
        threshold=MATTERS,
    ),
    setting("chance", "share", "Expected accuracy of a guess.", type="number"),
    setting("answers", "", "Number of answers behind the accuracy."),
)

# Approximation errors: `bench`, `mse`.
declare_quantities(
    error("output_mse", "squared", "Mean squared error of the output, mean over draws.", rounding=2),
    error("output_relative_error", "relative", "Norm of the error of the output over that of the output."),
    error("kernel_mse", "squared", "Mean squared error of the estimated softmax kernel.", rounding=2),
    setting("kernel_value", "", "Entry of the softmax kernel that kernel_mse refers to.", type="number"),
    setting("density", "share", "Share of the visible keys that queries read one by one.", type="number"),
    Quantity(
        name="covered_mass",
        unit="share",
        meaning="Share of the exact softmax weight on keys read one by one, mean over queries and heads.",
        better="more",
        threshold=MATTERS,
    ),
    setting("expected_kernel_mse", "squared", "Theoretical expectation of kernel_mse.", type="number"),
    condition(
        "compared_queries",
        "",
        "Number of queries of each head in the error, drawn at random; null: all.",
        type="whole number",
    ),
    kinds={"error": "approximation error"},
)
