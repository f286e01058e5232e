"""Methods paragraph of a paper from records and environment, and the backends' papers."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from efficient_attn.measure.record import Record
from efficient_attn.measure.units import show_bytes
from efficient_attn.report.table import plain
from efficient_attn.report.text import describe, setting
from efficient_attn.stats.estimates import CORRELATION, RUN_SHIFT

# How each kind of record was measured.
_METHODS = {
    "time": "Each call was repeated before timing until successive calls agreed within a tenth or a limit "
    "was spent; the backends were then interleaved within each length, in order and in reverse. Times are "
    "the median over rounds of each round's median, with Student's 95 % interval over the rounds of this "
    f"run, widened for neighbouring rounds that correlate by up to {CORRELATION} and for a shift of "
    f"{RUN_SHIFT:.0%} from run to run.",
    "device time": "Device times are those of calls queued behind a spinning kernel, between two events, "
    "without launches; where the L2 cache is cold, it was flushed before each call.",
    "memory": "Peak memory is the most that a call held beyond its inputs and parameters, by every "
    "allocation and release that torch's allocator reports.",
    "error": "Errors are relative Frobenius norms against softmax attention computed by its formula in "
    "float64 on the same inputs; for random features they are medians over independent draws.",
    "swap": "The model read the first tokens of each text with its own attention, and with each backend in "
    "its place and the same weights; cosines, divergences and relative errors compare the two, computed in "
    "float64, and are means over texts and draws of random features.",
    "recall": "Every block began with the same weights for a seed and saw the same sequences in the same "
    "order, drawn anew for every step; its accuracy was measured on sequences outside the training set. The "
    "time of a step is the median over all steps of forward pass, backward pass and update, without drawing "
    "the sequences.",
}


_FIELD = re.compile(r"^  (\w+) = \{(.*)\},\n", re.MULTILINE)


class Paper(NamedTuple):
    """Bibliography entry of a paper.

    Attributes:
        authors: `Surname, Given and Surname, Given`, as in BibTeX.
        backends: Names of the backends that implement its method.
    """

    key: str
    authors: str
    year: int
    address: str
    backends: tuple[str, ...]

    @property
    def short(self) -> str:
        """`Choromanski et al. 2021`."""
        surnames = [author.partition(",")[0] for author in self.authors.split(" and ")]
        names = surnames[0] + (" et al." if len(surnames) > 2 else "".join(f" and {n}" for n in surnames[1:]))
        return f"{names} {self.year}"


def _stored_papers() -> Iterator[Paper]:
    """Papers of papers.bib, with the names of their backends."""
    stored = files(__package__).joinpath("papers.bib").read_text("utf-8")
    for text in re.findall(r"^@.*?^\}$", stored, re.MULTILINE | re.DOTALL):
        fields = dict(_FIELD.findall(text))
        yield Paper(
            key=re.split("[{,]", text)[1],
            authors=fields["author"],
            year=int(fields["year"]),
            address=fields["url"],
            backends=tuple(fields["backends"].split(", ")),
        )


PAPERS = tuple(_stored_papers())


def how_measured(records: Sequence[Record], environment: Mapping[str, Any]) -> str:
    """Paragraph on machine, software, cases, backends and kinds of measurement."""
    if not records:
        return "Nothing was measured."
    measured = [record for record in records if record.status == "ok"]
    kinds = {record.case.kind for record in measured}
    kinds |= {"device time" for record in measured if record.device_times_s}
    cases = [record.case for record in records]
    tokens = _listed(sorted(case.tokens for case in cases))
    cited = [
        case.backend
        + "".join(f" ({paper.short}, {paper.address})" for paper in PAPERS if case.backend in paper.backends)
        for case in cases
    ]
    parts = [
        _where(environment),
        f"Measured quantities: {_listed(f'{case.kind} of {case.of}' for case in cases)} at {tokens} tokens; "
        f"{_listed(map(setting, cases))}. "
        f"Inputs: {_listed(f'{describe(case.inputs)} (seed {case.seed})' for case in cases)}.",
        f"Backends and baselines: {_listed(cited)}.",
        *(text for kind, text in _METHODS.items() if kind in kinds),
    ]
    if len(measured) < len(records):
        failed = len(records) - len(measured)
        parts.append(f"{failed} of {len(records)} points could not be measured.")
    return plain(" ".join(parts))


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Nested values as `torch.version` and its text, without unknown values."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{name}.")
        elif value not in (None, [], ""):
            yield plain(f"{above}{name}"), plain(_text(name, value))


def _text(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if name.endswith("_bytes") and isinstance(value, int) and 0 <= value < 1 << 63:
        return show_bytes(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _where(environment: Mapping[str, Any]) -> str:
    """Sentence on date, machine and software."""
    names = dict(flat(environment))
    machine = names.get("gpu.name") or names.get("processor") or "a machine that was not recorded"
    software = {
        "efficient-attn ": "packages.efficient-attn",
        "torch ": "torch.version",
        "Python ": "python",
        "": "system",
    }
    versions = [f"{name}{names[key]}" for name, key in software.items() if key in names]
    date = f" on {names['utc'][:10]}" if "utc" in names else ""
    return f"Measured{date} on {machine}{' with ' if versions else ''}{', '.join(versions)}."


def _listed(values: Iterable[object]) -> str:
    """Distinct values, joined by commas, and shortened beyond twelve."""
    names = list(dict.fromkeys(map(str, values)))
    return ", ".join(names) if len(names) <= 12 else f"{names[0]} to {names[-1]} ({len(names)} in all)"
