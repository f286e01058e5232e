"""Methods paragraph of a paper from records and environment, and the backends' papers."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

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
    "order, drawn anew for every step; its accuracy was measured on sequences outside the training set.",
}


def _citations() -> dict[str, str]:
    """{backend: `Choromanski et al. 2021, address`} of the papers in papers.bib."""
    cited: dict[str, str] = {}
    stored = files(__package__).joinpath("papers.bib").read_text("utf-8")
    for text in re.findall(r"^@.*?^\}$", stored, re.MULTILINE | re.DOTALL):
        fields = dict(re.findall(r"^  (\w+) = \{(.*)\},\n", text, re.MULTILINE))
        surnames = [author.partition(",")[0] for author in fields["author"].split(" and ")]
        names = " and ".join(surnames) if len(surnames) < 3 else f"{surnames[0]} et al."
        citation = f"{names} {fields['year']}, {fields['url']}"
        cited |= dict.fromkeys(fields["backends"].split(", "), citation)
    return cited


CITATIONS = _citations()


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
        f"{case.backend} ({CITATIONS[case.backend]})" if case.backend in CITATIONS else case.backend
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
