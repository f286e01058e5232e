"""Quantities that records hold, as data: unit, direction, and the repetitions over which each scatters."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Better = Literal["less", "more"]
Scatter = Literal["rounds", "draws", "windows", "seeds"]
Entry = Literal["last", "worst"]

# Relative change that matters, unless --fail-on names another: of scattering numbers, and of bits per byte,
# which are a logarithm.
_MATTERS, _MATTERS_OF_BITS = 0.05, 0.02


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number that records hold, and the way in which two runs are compared by it.

    Attributes:
        name: Name in tables, in JSON and of --fail-on.
        better: Direction of an improvement; None: a change is neither better nor worse.
        scatter: Repetitions over which the number differs by chance; None: it is reproduced by its case.
        threshold: Relative change that matters.
        record_field: Field of a record; omitted: the name.
        samples: Field of the raw values, one per repetition; None: records keep none.
        entry: Compared entry of a field with several.
        rounding: The number is rounding error if it is below this power of the precision of its dtype;
            0: never.
    """

    name: str
    unit: str
    better: Better | None = "less"
    scatter: Scatter | None = None
    threshold: float = 0.0
    record_field: str | None = None
    samples: str | None = None
    entry: Entry | None = None
    rounding: int = 0

    @property
    def field(self) -> str:
        """Field of a record that holds the number."""
        return self.record_field or self.name


def _errors(*names: str, unit: str, rounding: int = 1) -> Iterator[Quantity]:
    """Errors with one value per draw."""
    for name in names:
        yield Quantity(
            name=name,
            unit=unit,
            scatter="draws",
            threshold=_MATTERS,
            samples=f"{name}_draws",
            rounding=rounding,
        )


def _means_of_errors(*names: str, unit: str, entry: Entry | None = None) -> Iterator[Quantity]:
    """Errors of which records keep the mean over draws alone."""
    for name in names:
        yield Quantity(name=name, unit=unit, scatter="draws", threshold=_MATTERS, entry=entry, rounding=1)


def _settings(*names: str, unit: str = "", entry: Entry | None = None) -> Iterator[Quantity]:
    """Numbers that describe the measurement or follow from theory."""
    for name in names:
        yield Quantity(name=name, unit=unit, better=None, threshold=1e-9, entry=entry)


QUANTITIES: tuple[Quantity, ...] = (
    Quantity(
        name="time_s",
        unit="s",
        scatter="rounds",
        threshold=_MATTERS,
        record_field="times_s",
        samples="times_s",
    ),
    Quantity(
        name="train_step_s",
        unit="s",
        scatter="rounds",
        threshold=_MATTERS,
        record_field="train_seconds_s",
        samples="train_seconds_s",
    ),
    *(
        Quantity(name=name, unit="bytes")
        for name in ("peak_bytes", "requested_peak_bytes", "parameter_bytes", "state_bytes")
    ),
    *(
        Quantity(name=name, unit="")
        for name in ("flops", "sequential_operations", "path_length", "numbers_read")
    ),
    *_errors("output_relative_error", "weights_relative_error", "hidden_relative_error", unit="relative"),
    *_errors("output_mse", "kernel_mse", unit="squared", rounding=2),
    *_errors("weights_row_kl", "next_token_kl", unit="nats"),
    *_errors("mean_pool_distance", "first_token_distance", unit="1 − cosine"),
    *_errors("next_token_disagreement", unit="share"),
    *_errors("perplexity", unit="", rounding=0),
    *_means_of_errors("output_bias", "output_spread", "output_rounding", unit="relative"),
    *_means_of_errors("weights_error_exact_sums", "weights_error_own_sums", unit="relative"),
    *_means_of_errors("unsafe_rows", unit="share"),
    *_means_of_errors(
        "output_relative_error_heads", "hidden_relative_error_layers", unit="relative", entry="worst"
    ),
    Quantity(name="accuracy", unit="share", better="more", scatter="seeds", threshold=_MATTERS),
    Quantity(
        name="train_bits_per_byte",
        unit="bits per byte",
        scatter="seeds",
        threshold=_MATTERS_OF_BITS,
        entry="last",
    ),
    Quantity(
        name="held_out_bits_per_byte",
        unit="bits per byte",
        scatter="windows",
        threshold=_MATTERS_OF_BITS,
        samples="held_out_bits_per_byte_windows",
        entry="last",
    ),
    *_settings("num_directions", "matched_size", "chance", "answers", "texts", "kernel_value"),
    *_settings("expected_output_mse", "expected_kernel_mse", unit="squared"),
    *_settings("train_steps", entry="last"),
    Quantity(name="matched_amount", unit="", better=None, threshold=_MATTERS),
    Quantity(name="singular_values", unit="", better=None, threshold=_MATTERS, entry="worst"),
)

BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}

# Texts of a record that describe how its numbers came about; a change is reported as such.
TEXTS = ("calibrated_on", "matched")

# Fields that no verdict of their own is made from, and their part in the comparison.
CONDITIONS = {
    "status": "compared first; numbers are compared where it is ok",
    "reason": "part of the remark on a changed status",
    "turn_sizes": "the rounds of times_s",
    "waited_s": "makes a slower time unclear",
    "memory_method": "peaks counted by two methods are not comparable",
    "empty_call_s": "a warning about the machine",
    "matmul_flops_per_s": "a warning about the machine",
}
