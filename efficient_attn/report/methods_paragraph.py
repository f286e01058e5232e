"""Methods paragraph of a paper, made from records and environment alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from efficient_attn.measure.memory import ALLOCATIONS, CUDA_ALLOCATED
from efficient_attn.report.error_table import describe
from efficient_attn.report.escape import plain
from efficient_attn.runner.records import Case, Record
from efficient_attn.runner.units import show_bytes
from efficient_attn.stats.rounds import CORRELATION

_MEMORY = {
    ALLOCATIONS: "every allocation and release that torch's CPU allocator reports",
    CUDA_ALLOCATED: "the peak that torch's caching CUDA allocator reports",
}

# How each kind of record was measured.
_METHODS = {
    "time": "Each call was repeated before timing until successive calls agreed within a tenth or a limit "
    "was spent; the backends were then interleaved within each length, in order and in reverse. Times are "
    "the median over rounds of each round's median, with Student's 95 % interval over the rounds of this "
    f"run, widened for neighbouring rounds that correlate by up to {CORRELATION}.",
    "error": "Errors are relative Frobenius norms against softmax attention computed by its formula in "
    "float64 on the same inputs; for random features they are medians over independent draws.",
    "train": "Models were trained in turn, some steps of each, on the same batches and from the same weights "
    "for all shared parameters; bits per byte are means over windows of held-out text, and seconds exclude "
    "evaluation.",
    "swap": "The model read the first tokens of each text with its own attention, and with each backend in "
    "its place and the same weights; cosines, divergences and relative errors compare the two, computed in "
    "float64, and are means over texts and draws of random features.",
    "recall": "Every block began with the same weights for a seed and saw the same sequences in the same "
    "order, drawn anew for every step; its accuracy was measured on sequences outside the training set. The "
    "time of a step is the median over all steps of forward pass, backward pass and update, without drawing "
    "the sequences.",
}


def how_measured(records: Sequence[Record], environment: Mapping[str, Any]) -> str:
    """A paragraph on the machine, the software, the cases and the measurement of each kind of number."""
    if not records:
        return "Nothing was measured."
    measured = [record for record in records if record.status == "ok"]
    kinds = {record.case.kind for record in measured}
    parts = [_where(environment), _cases([record.case for record in records])]
    parts += [text for kind, text in _METHODS.items() if kind in kinds]
    methods = {record.memory_method for record in measured if record.memory_method}
    if methods:
        ways = "; ".join(_MEMORY.get(method, method) for method in sorted(methods))
        parts.append(f"Peak memory is the most that a call held beyond its inputs and parameters, by {ways}.")
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
    tokens = sorted({case.tokens for case in cases})
    return (
        f"Taken was {_each(cases, _subject)} at {_listed(list(map(str, tokens)))} tokens, "
        f"{_each(cases, _shape)}. Inputs, from seed {_each(cases, lambda case: str(case.seed))}: "
        f"{_each(cases, lambda case: describe(case.inputs))}."
    )


def _shape(case: Case) -> str:
    where = f"the CPU with {case.threads} threads" if case.device == "cpu" else case.device
    return f"batch {case.batch}, heads {case.num_heads}, head_dim {case.head_dim}, {case.dtype} on {where}"


def _subject(case: Case) -> str:
    """`the forward pass of attention, causal`, `the error of output`."""
    if case.kind == "train":
        return f"the training of a language model of {case.layers} blocks"
    passes = "the forward and backward pass" if case.backward else "the forward pass"
    quantity = f"the {case.kind}" if case.kind in ("error", "recall") else passes
    return f"{quantity} of {case.of}{', causal' if case.causal else ''}"


def _each(cases: Sequence[Case], say: Callable[[Case], str]) -> str:
    return _listed(list(dict.fromkeys(map(say, cases))))


def _listed(parts: Sequence[str]) -> str:
    """`a, b and c`; the first, the last and the count of more than twelve."""
    if len(parts) > 12:
        return f"{parts[0]} to {parts[-1]} ({len(parts)} in all)"
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
