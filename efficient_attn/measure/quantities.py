"""Quantities of records: unit, meaning, type, and the comparison of two runs by them.

A quantity is a typed attribute of a class of records, `accuracy: float | None = Quantity("share", …)`. The
type and fields of a line, the reader, the JSON Schema, the reference table, `diff` and `--fail-on` follow.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple, get_args

Better = Literal["less", "more"]
Scatter = Literal["rounds", "draws", "seeds"]

# Types of fields by those of attributes, `float | None` and others.
_TYPES: dict[Any, str] = {float: "number", int: "whole number", str: "text"}
_TYPES |= {tuple[float, ...]: "numbers", tuple[int, ...]: "whole numbers"}

# Relative change of a scattering number that matters unless --fail-on names another.
MATTERS = 0.05


class Field(NamedTuple):
    """Field of a record that holds a quantity or its samples."""

    name: str
    type: str
    unit: str
    meaning: str


@dataclass
class Quantity:
    """A measured value, and the way in which two runs are compared by it.

    Attributes:
        meaning: Definition that begins with a noun.
        signed: Whether the number may be negative.
        better: Direction of an improvement; None: a change is neither better nor worse.
        scatter: Repetitions over which the number differs by chance; None: it is reproduced by its case.
        name: Name in tables, in JSON and of --fail-on; omitted: the attribute's.
        samples: Field of the raw values, one per repetition; `draws` stands for the attribute with `_draws`.
        rounding: The number is rounding error if it is below this power of the precision of its dtype;
            0: never.
        compared: Whether two runs are compared by it; False: the field describes a condition.
        field: Field of a record that holds the value: the attribute's name.
        type: Type of this field, by the attribute's.
    """

    unit: str
    meaning: str
    _: KW_ONLY
    signed: bool = False
    better: Better | None = "less"
    scatter: Scatter | None = None
    threshold: float = 0.0
    name: str = ""
    samples: str | None = None
    rounding: int = 0
    compared: bool = True
    field: str = ""
    type: str = ""

    def __set_name__(self, owner: Any, name: str) -> None:
        self.field, self.name = name, self.name or name
        self.samples = f"{name}_draws" if self.samples == "draws" else self.samples
        # Its annotation is a type or None.
        self.type = "signed " * self.signed + _TYPES[get_args(owner.__annotations__[name])[0]]

    def __get__(self, record: Any, owner: Any) -> Any:
        return self if record is None else record.measured.get(self.field)

    @property
    def fields(self) -> Iterator[Field]:
        """Fields of a record for the value and for its samples."""
        yield Field(self.field, self.type, self.unit, self.meaning)
        if self.samples not in (None, self.field):
            repetition = f"{self.scatter}".removesuffix("s")
            meaning = f"Values of {self.field}, one per {repetition}."
            yield Field(f"{self.samples}", "signed " * self.signed + "numbers", self.unit, meaning)


def cost(unit: str, meaning: str) -> Any:
    """Whole number that its case reproduces, of which less is better."""
    return Quantity(unit, meaning)


def error(
    unit: str, meaning: str, *, rounding: int = 1, better: Better = "less", signed: bool = False
) -> Any:
    """Error with one value per draw, kept in `NAME_draws`."""
    return Quantity(
        unit,
        meaning,
        signed=signed,
        better=better,
        scatter="draws",
        threshold=MATTERS,
        samples="draws",
        rounding=rounding,
    )


def share(meaning: str, *, scatter: Scatter | None = None) -> Any:
    """Share of which more is better."""
    return Quantity("share", meaning, better="more", scatter=scatter, threshold=MATTERS)


def setting(unit: str, meaning: str, *, threshold: float = 1e-9) -> Any:
    """Value of the measurement or of theory, of which a change is neither better nor worse."""
    return Quantity(unit, meaning, better=None, threshold=threshold)


def condition(unit: str, meaning: str, *, samples: str | None = None) -> Any:
    """Field that is not compared."""
    scatter: Scatter | None = "draws" if samples else None
    return Quantity(unit, meaning, better=None, compared=False, scatter=scatter, samples=samples)


def _times(name: str, samples: str, meaning: str) -> Any:
    return Quantity(
        "s",
        f"{meaning}, one entry per timed call, in order.",
        scatter="rounds",
        threshold=MATTERS,
        name=name,
        samples=samples,
    )


class Measured:
    """Quantities of `bench`, `mse` and `recall`, each None where it was not measured."""

    times_s: tuple[float, ...] | None = _times(
        "time_s", "times_s", "Wall-clock time of a call; on one CPU thread its processor time"
    )
    device_times_s: tuple[float, ...] | None = _times(
        "device_time_s", "device_times_s", "Time of a queued call on a GPU without launch overhead"
    )
    round_sizes: tuple[int, ...] | None = condition("", "Number of timed calls in each round, in order.")
    round_numbers: tuple[int, ...] | None = condition(
        "", "Number of each round in its run, from 0; null: without gaps."
    )
    kernels: str | None = condition(
        "",
        "Kernels of the calls: cpu (algorithms for its caches), flex, varlen, torch (PyTorch's operators).",
    )
    peak_bytes: int | None = cost("bytes", "Peak of allocated memory above the level before the call.")
    parameter_bytes: int | None = cost("bytes", "Size of the parameters of the backend.")
    state_bytes: int | None = cost("bytes", "Size of the streaming state after all tokens.")
    flops: int | None = cost("FLOP", "Floating-point operations of the matrix products of a call.")
    calibrated_on: str | None = setting(
        "", "Inputs of the calibration of data-dependent parameters; null: none, or an earlier calibration."
    )
    floats_read: int | None = cost(
        "", "Number of floats that a query reads per head: keys and values, or a state."
    )
    accuracy: float | None = share("Share of correct answers after training.", scatter="seeds")
    chance: float | None = setting("share", "Expected accuracy of random guessing.")
    answers: int | None = setting("", "Number of answers that the accuracy is computed from.")
    output_mse: float | None = error("squared", "Mean squared error of the output.", rounding=2)
    output_relative_error: float | None = error(
        "relative", "Norm of the output error over the exact output's."
    )
    output_correlation: float | None = error(
        "",
        "Cosine c of the deviations of output and exact output from uniform attention.",
        better="more",
        signed=True,
    )
    output_deviation_ratio: float | None = condition(
        "", "Norm ρ of the deviation from uniform attention over the exact deviation's.", samples="draws"
    )
    output_rescaled_error: float | None = condition(
        "relative", "Error of the output after the best rescaling of its deviation.", samples="draws"
    )
    output_by_head: str | None = condition(
        "", "Error, correlation, deviation ratio and rescaled error of each head, means over draws, JSON."
    )
    weights_relative_error: float | None = error(
        "relative", "Norm of the error of attention weights over theirs, root mean square over heads."
    )
    weights_rank: int | None = setting("", "Largest rank of the weights, before a causal mask.")
    weights_floor: float | None = setting("relative", "Least weights_relative_error of this rank.")
    weights_unbiased_error: float | None = setting(
        "relative", "Least expected error of weights_rank unbiased terms of rank one."
    )
    kernel_mse: float | None = error("squared", "Mean squared error of the softmax kernel.", rounding=2)
    kernel_value: float | None = setting("", "Entry of the softmax kernel that kernel_mse refers to.")
    density: float | None = setting("share", "Share of the visible keys that queries read individually.")
    covered_mass: float | None = share(
        "Share of the exact softmax weight on keys read individually, mean over queries and heads."
    )
    expected_kernel_mse: float | None = setting("squared", "Theoretical expectation of kernel_mse.")
    texts: int | None = setting("", "Number of texts; values of draws are listed text by text.")
    compared_queries: int | None = condition(
        "", "Number of queries of each head in the error, drawn at random; null: all."
    )
