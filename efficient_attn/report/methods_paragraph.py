"""Methods paragraph of a paper, made from records and environment alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from efficient_attn.report.error_table import describe
from efficient_attn.report.escape import plain
from efficient_attn.report.notes import setting
from efficient_attn.report.papers import papers
from efficient_attn.runner.records import Case, Record
from efficient_attn.runner.units import show_bytes
from efficient_attn.stats.rounds import CORRELATION, RUN_SHIFT

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


def how_measured(records: Sequence[Record], environment: Mapping[str, Any]) -> str:
    """A paragraph on machine, software, cases, backends with their papers, and each kind of measurement."""
    if not records:
        return "Nothing was measured."
    measured = [record for record in records if record.status == "ok"]
    kinds = {record.case.kind for record in measured}
    kinds |= {"device time" for record in measured if record.device_times_s}
    cases = [record.case for record in records]
    parts = [_where(environment), _cases(cases), _backends(cases)]
    parts += [text for kind, text in _METHODS.items() if kind in kinds]
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
    known = dict(flat(environment))
    machine = known.get("gpu.name") or known.get("processor") or "a machine that was not recorded"
    software = {
        "efficient-attn ": "packages.efficient-attn",
        "torch ": "torch.version",
        "Python ": "python",
        "": "system",
    }
    versions = [f"{name}{known[key]}" for name, key in software.items() if key in known]
    date = f" on {known['utc'][:10]}" if "utc" in known else ""
    return f"Measured{date} on {machine}{' with ' if versions else ''}{', '.join(versions)}."


def _cases(cases: Sequence[Case]) -> str:
    subjects = _each(cases, lambda case: f"{case.kind} of {case.of}")
    tokens = _each(sorted(cases, key=lambda case: case.tokens), lambda case: case.tokens)
    inputs = _each(cases, lambda case: f"{describe(case.inputs)} (seed {case.seed})")
    return f"Measured quantities: {subjects} at {tokens} tokens; {_each(cases, setting)}. Inputs: {inputs}."


def _backends(cases: Sequence[Case]) -> str:
    def cited(case: Case) -> str:
        return case.backend + "".join(f" ({one.short}, {one.address})" for one in papers([case.backend]))

    return f"Backends and baselines: {_each(cases, cited)}."


def _each(cases: Sequence[Case], name: Callable[[Case], object]) -> str:
    """The distinct names, joined by commas; the first, the last and the count of more than twelve."""
    names = list(dict.fromkeys(str(name(case)) for case in cases))
    return ", ".join(names) if len(names) <= 12 else f"{names[0]} to {names[-1]} ({len(names)} in all)"
