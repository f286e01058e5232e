"""A study: its options as fields, the points that it measures, and the views of its records."""

import sys
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import Field, dataclass, fields
from functools import cached_property
from importlib import import_module
from math import inf
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, get_type_hints

import msgspec

from efficient_attn.errors import OptionError
from efficient_attn.measure.record import Case, Record


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement to come, as data that an executor can send to another process.

    Attributes:
        measure: Function of a module, or a partial of one, that returns the record; of a timed point it takes
            the `seconds` of the calls of one round.
        rounds: Interleaved rounds of a timed point; 0: measured once.
        label: `title`; None: backend, length and kind.
        series: Key of points whose durations are proportional to their `cost`.
        skip: Reason not to measure it.
    """

    case: Case
    measure: Callable[..., Record]
    rounds: int = 0
    label: str | None = None
    series: Hashable = None
    cost: float = 1.0
    skip: str | None = None

    @property
    def title(self) -> str:
        """Name in the progress display."""
        case = self.case
        place = "" if case.of == "attention" else f", {case.of}"
        return self.label or f"{case.label}{place}, {case.tokens} tokens, {case.kind}"


# A study yields a point, or a list of points that do not depend on each other, and is sent their records.
Points = Generator[Point | list[Point], Any, None]


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """Decisions of a study before its first point, stored with the run.

    Attributes:
        candidates: Labels of the backends that are compared.
        device: Device that measures, in this dtype and with this number of threads on the CPU.
        free_cores: Cores that others left free, in words, if the threads follow from them.
        model: Names and digests of the model, its texts and its layers.
    """

    candidates: tuple[str, ...] = ()
    device: str = "cpu"
    dtype: str | None = None
    threads: int | None = None
    free_cores: str | None = None
    model: Mapping[str, Any] = {}


S = TypeVar("S", bound=Settled, covariant=True)


class Run(NamedTuple, Generic[S]):
    """A run as views see it.

    Attributes:
        load: Largest share of all cores that other processes took.
        study: The study with its options, in functions of its `views`.
    """

    settled: S
    load: float = 0.0
    study: Any = None


@dataclass(frozen=True, eq=False)
class Study:
    """A measurement whose fields are its options: a command, and a function `efficient_attn.NAME`.

    A subclass lies in `efficient_attn/studies`, in a file or folder of its name; its docstring is the help.

    Attributes:
        record: Class of its records, with their quantities.
        budget_s: Seconds of measuring unless the user names others; None: no limit.
        views: Module with functions of (records, run): `tables`, `sentences` with the conclusion first,
            `plots` by the name of their files, and further `files`, {name: text}.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    record: ClassVar[type[Record]] = Record
    budget_s: ClassVar[float | None] = None
    settled_type: ClassVar[type[Settled]] = Settled
    views: ClassVar[str] = "efficient_attn.runs.default_view"

    @classmethod
    def name(cls) -> str:
        """Name of its file or folder: of the command, of the function and in stored runs."""
        return cls.__module__.rpartition("studies.")[2].partition(".")[0]

    @classmethod
    def declared(cls) -> Iterator[tuple[Field[Any], Any]]:
        """Fields with a help text, which the command line has, and their types."""
        hints = get_type_hints(cls, vars(sys.modules[cls.__module__]))
        return ((item, hints[item.name]) for item in fields(cls) if "help" in item.metadata)

    @cached_property
    def settled(self) -> Settled:
        """Result of `settle`, which runs once."""
        return self.settle()

    def check(self) -> None:
        """Refuse options that do not fit each other, without torch and before any folder is made."""

    def settle(self) -> Settled:
        """Load the inputs and decide what the options leave open."""
        return self.settled_type()

    def point_limit_s(self) -> float:
        """Seconds of one point, all its rounds together."""
        return inf

    def notes(self) -> Sequence[str]:
        """Remarks such as omitted sizes."""
        return ()

    def resources(self) -> AbstractContextManager[Any]:
        """Context that is open while points are measured."""
        return nullcontext()

    def points(self) -> Points:
        """Yield what to measure. A run asks for it more than once."""
        raise NotImplementedError

    def view(self, name: str, records: Sequence[Any], run: Run[Any]) -> Any:
        """Result of a view: of the method of that name, or of the function of the module `views`."""
        function = getattr(self, name, None) or getattr(import_module(self.views), name, None)
        return [] if function is None else function(records, run._replace(study=self))

    def refuse(self, *names: str, reason: str) -> None:
        """Reject options that have no effect, unless they have their default."""
        for item in fields(self):
            value, default = getattr(self, item.name), item.default
            if item.name in names and (tuple(value) if isinstance(value, list) else value) != default:
                raise OptionError(f"{item.name} has no effect {reason}.")
