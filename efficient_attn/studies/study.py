"""A study: its options, the plan that they make, and the points that the plan measures."""

import importlib
import inspect
import itertools
import math
import typing
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from efficient_attn.measure.quantities import Quantity, register
from efficient_attn.measure.record import Case, Record

# Keys of a run's environment: name of the study, digest of the code of every backend from a file, labels of
# the candidates of a comparison.
STUDY, CODE, CANDIDATES = "study", "code", "candidates"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement to come, as data that an executor can send to another process.

    Attributes:
        measure: Function of a module, or a partial of one, that returns the record; of a timed point it takes
            the `seconds` of the calls of one round.
        rounds: Interleaved rounds of a timed point; 0: measured once.
        label: Name in the progress display; None: backend, length and kind.
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


Request = Point | list[Point]
Steps = Generator[Request, Any, None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A study whose options are checked and whose inputs are loaded.

    Attributes:
        steps: Function that starts the study; a run starts it more than once.
        notes: Remarks such as omitted sizes.
        about: Entries of the run's environment.
        fixed: Names of entries on which the study decides; a resumed run must have equal ones.
        timeout_s: Seconds of one point, all its rounds together.
        resources: Context that is open while points are measured.
        budget_s: Seconds of measuring unless the user names others; None: no limit.
    """

    steps: Callable[[], Steps]
    device: str = "cpu"
    notes: Sequence[str] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    fixed: Sequence[str] = ()
    timeout_s: float = math.inf
    resources: AbstractContextManager[Any] = field(default_factory=nullcontext)
    budget_s: float | None = None


def in_lists(lists: Iterable[list[Point]]) -> Steps:
    """The steps of a study whose points do not depend on records."""
    for points in lists:  # noqa: UP028  (records are sent to a generator, not to an iterator of lists)
        yield points


def interleaved(lines: Iterable[Iterable[Point]]) -> list[Point]:
    """The first point of every line, then the second ones; each case once."""
    rows = itertools.zip_longest(*lines)
    return list({point.case.key: point for row in rows for point in row if point is not None}.values())


@dataclass(frozen=True, kw_only=True)
class Option:
    """Declaration of one parameter of a plan: its help text, its flag, and its value from text.

    The annotation `Annotated[int, Option(help="Random seed.")]` of a parameter is the only place where it is
    declared: the command line, the docstring and the reference page follow from it.

    Attributes:
        help: One line, the standard term first.
        flag: Flag of the command line; omitted: the parameter's name with hyphens.
        metavar: Form of the value in the help text.
        parse: Value from text: `parse(text, name=flag)`; omitted: the annotated type decides.
        least: Smallest number; `most` is the largest.
        several: The flag may be repeated; `parse` gets the list of texts.
        argument: A positional argument instead of a flag.
        rare: Shown by --help-all alone.
    """

    help: str
    flag: str | None = None
    metavar: str | None = None
    parse: Callable[..., Any] | None = None
    least: float | None = None
    most: float | None = None
    several: bool = False
    argument: bool = False
    rare: bool = False


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of a plan with its flag on the command line and its declaration."""

    name: str
    flag: str
    type: Any
    default: Any
    option: Option


@dataclass(frozen=True, kw_only=True)
class Study:
    """One measurement: registered by lying in the folder `efficient_attn.studies`.

    Attributes:
        name: Name of the command, of the Python function and in environments of runs.
        plan: Planning function: its parameters are the options; it runs nothing.
        module: Name of its file, or of its package, whose module `view` shows records.
        kinds: Kinds of records of this study.
        quantities: Quantities of these records, the most important first.
        budget: Default of `--budget`; None: no limit.
    """

    name: str
    plan: Callable[..., Plan]
    module: str
    kinds: tuple[str, ...] = ()
    quantities: tuple[Quantity, ...] = ()
    budget: str | None = None

    def __post_init__(self) -> None:
        register(*self.quantities, kinds=dict.fromkeys(self.kinds, self.summary))

    @property
    def summary(self) -> str:
        """First line of the planning function's docstring."""
        return (inspect.getdoc(self.plan) or "").partition("\n")[0]

    @cached_property
    def view(self) -> Any:
        """Functions that show records: defaults where the module has none."""
        # Help texts are shown without numpy.
        from efficient_attn.studies.view import view_of

        module = importlib.import_module(self.module)
        is_folder = hasattr(module, "__path__")
        return view_of(importlib.import_module(f"{self.module}.view") if is_folder else module)

    def parameters(self) -> Iterator[Parameter]:
        """Declared options, in the order of the planning function."""
        hints = typing.get_type_hints(self.plan, include_extras=True)
        for name, parameter in inspect.signature(self.plan).parameters.items():
            kind, *metadata = typing.get_args(hints[name]) or (hints[name],)
            for option in metadata:
                if isinstance(option, Option):
                    flag = option.flag or f"--{name.replace('_', '-')}"
                    yield Parameter(name=name, flag=flag, type=kind, default=parameter.default, option=option)


def missing(environment: Mapping[str, Any] | None, measured: Collection[str]) -> str:
    """` Not measured (2 of 5 candidates): window, linformer.`; empty if nothing is missing."""
    listed = (environment or {}).get(CANDIDATES)
    labels = (
        dict.fromkeys(label for label in listed if isinstance(label, str)) if isinstance(listed, list) else {}
    )
    left = [label for label in labels if label not in measured]
    return f" Not measured ({len(left)} of {len(labels)} candidates): {', '.join(left)}." if left else ""
