"""Quantities of records as data: name, unit, meaning, type, and the comparison of two runs by them.

A study declares its quantities with `register`. The fields of records, the reader, the JSON Schema, the
reference table, `diff` and the names of `--fail-on` follow from the declarations.
"""

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal, NamedTuple

Better = Literal["less", "more"]
Scatter = Literal["rounds", "draws", "seeds"]
Entry = Literal["worst"]
Type = Literal["number", "whole number", "numbers", "whole numbers", "text"]

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
        better: Direction of an improvement; None: a change is neither better nor worse.
        scatter: Repetitions over which the number differs by chance; None: it is reproduced by its case.
        threshold: Relative change that matters.
        record_field: Field of a record; omitted: the name.
        samples: Field of the raw values, one per repetition; None: records keep none.
        entry: Compared entry of a field with several.
        rounding: The number is rounding error if it is below this power of the precision of its dtype;
            0: never.
        condition: Part in the comparison of a field without a verdict of its own; None: it is compared.
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
    entry: Entry | None = None
    rounding: int = 0
    condition: str | None = None

    @property
    def field(self) -> str:
        """Field of a record that holds the value."""
        return self.record_field or self.name

    @property
    def fields(self) -> Iterator[Field]:
        """Fields of a record for the value and for its samples."""
        yield Field(self.field, self.type, self.unit, self.meaning)
        if self.samples not in (None, self.field):
            one = f"{self.scatter}".removesuffix("s")
            yield Field(f"{self.samples}", "numbers", self.unit, f"Values of {self.field}, one per {one}.")


# Declared so far: compared quantities and conditions by name, fields and kinds of records.
QUANTITIES: dict[str, Quantity] = {}
CONDITIONS: dict[str, Quantity] = {}
FIELDS: dict[str, Field] = {}
KINDS: dict[str, str] = {}


def register(*quantities: Quantity, kinds: Mapping[str, str] | None = None) -> None:
    """Declare quantities, and kinds of records with their meaning.

    Several studies may declare the same quantity in the same words.
    """
    for quantity in quantities:
        table = QUANTITIES if quantity.condition is None else CONDITIONS
        if table.setdefault(quantity.name, quantity) != quantity:
            raise RuntimeError(f"Two quantities are called {quantity.name!r}; rename one of them.")
        for field in quantity.fields:
            if FIELDS.setdefault(field.name, field) != field:
                raise RuntimeError(f"Two quantities are kept in {field.name!r}; rename one of the fields.")
    KINDS.update({kind: meaning for kind, meaning in (kinds or {}).items() if kind not in KINDS})


def cost(name: str, unit: str, meaning: str) -> Quantity:
    """Whole number that its case reproduces; less is better."""
    return Quantity(name, unit, meaning, type="whole number")


def mean_error(name: str, unit: str, meaning: str, *, type: Type = "number") -> Quantity:
    """Error of which records keep the mean over draws alone; of several entries the worst is compared."""
    entry: Entry | None = "worst" if type == "numbers" else None
    return replace(error(name, unit, meaning), type=type, samples=None, entry=entry)


def error(name: str, unit: str, meaning: str, *, rounding: int = 1) -> Quantity:
    """Error with one value per draw, kept in `NAME_draws`."""
    kept = f"{name}_draws"
    return Quantity(name, unit, meaning, scatter="draws", threshold=MATTERS, samples=kept, rounding=rounding)


def setting(
    name: str,
    unit: str,
    meaning: str,
    *,
    type: Type = "whole number",
    threshold: float = 1e-9,
    entry: Entry | None = None,
) -> Quantity:
    """Value that describes the measurement or follows from theory; a change is neither better nor worse."""
    return Quantity(name, unit, meaning, type=type, better=None, threshold=threshold, entry=entry)


def condition(name: str, unit: str, meaning: str, part: str, *, type: Type = "number") -> Quantity:
    """Field without a verdict of its own, with its part in the comparison."""
    return Quantity(name, unit, meaning, type=type, better=None, condition=part)
