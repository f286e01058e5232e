"""Methods paragraph of a paper, made from records and environment alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from efficient_attn.measure.memory import ALLOCATIONS, CUDA_ALLOCATED
from efficient_attn.report.error_table import describe
from efficient_attn.report.escape import plain
from efficient_attn.runner.records import Case, Record
from efficient_attn.runner.units import show_bytes
from efficient_attn.stats.rounds import CORRELATION, FEWEST_ROUNDS, round_times

_MEMORY = {
    ALLOCATIONS: "every allocation and release that torch's CPU allocator reports",
    CUDA_ALLOCATED: "the peak that torch's caching CUDA allocator reports",
}


def how_measured(records: Sequence[Record], environment: Mapping[str, Any]) -> str:
    """A paragraph on the machine, the software, the cases and the measurement of each kind of number."""
    if not records:
        return "Nothing was measured."
    parts = (
        _where(environment),
        _what(records),
        _times(records),
        _memory(records),
        _errors(records),
        _training(records),
        _swaps(records),
        _recall(records),
    )
    return plain(" ".join([sentence for sentence in (*parts, _lacking(records)) if sentence]))


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Nested values as `torch.version` and its text, without unknown values."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{name}.")
        elif value not in (None, [], ""):
            yield plain(f"{above}{name}"), plain(_say(name, value))


def _say(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if name.endswith("_bytes") and isinstance(value, int) and 0 <= value < 1 << 63:
        return show_bytes(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _where(environment: Mapping[str, Any]) -> str:
    known = dict(flat(environment))
    machine = known.get("gpu.name") or known.get("processor") or "a machine that was not recorded"
    cores = f" ({known['cores_usable']} cores)" if "cores_usable" in known and "gpu.name" not in known else ""
    software = [
        f"{name} {known[key]}"
        for name, key in (
            ("efficient-attn", "packages.efficient-attn"),
            ("torch", "torch.version"),
            ("Python", "python"),
            ("", "system"),
        )
        if key in known
    ]
    date = f" on {known['utc'][:10]}" if "utc" in known else ""
    with_ = f" with {_listed([name.strip() for name in software])}" if software else ""
    return f"Measured{date} on {machine}{cores}{with_}."


def _what(records: Sequence[Record]) -> str:
    cases = [record.case for record in records]
    subject = _each(cases, _subject)
    shape = _each(cases, lambda case: f"batch {case.batch}, heads {case.num_heads}, head_dim {case.head_dim}")
    tokens = sorted({case.tokens for case in cases})
    where = _each(
        cases,
        lambda case: (
            f"{case.dtype} on the CPU with {case.threads} threads"
            if case.device == "cpu"
            else f"{case.dtype} on {case.device}"
        ),
    )
    inputs = "; ".join(dict.fromkeys(describe(case.inputs) for case in cases))
    seeds = _each(cases, lambda case: str(case.seed))
    return (
        f"Taken was {subject} at {_listed([str(number) for number in tokens])} tokens, {shape}, {where}. "
        f"Inputs, from seed {seeds}: {inputs}."
    )


def _subject(case: Case) -> str:
    """`the forward pass of attention, causal`, `the error of output`."""
    if case.kind == "train":
        return f"the training of a language model of {case.layers} blocks, causal"
    passes = "the forward and backward pass" if case.backward else "the forward pass"
    taken = f"the {case.kind} of {case.of}" if case.kind in ("error", "recall") else f"{passes} of {case.of}"
    return f"{taken}{', causal' if case.causal else ''}"


def _times(records: Sequence[Record]) -> str:
    timed = [r for r in records if r.case.kind == "time" and r.status == "ok" and r.times_s]
    if not timed:
        return ""
    counts = [len(record.times_s or ()) for record in timed]
    turns = [len(record.round_sizes) for record in timed if record.round_sizes]
    rounds = f" {_range(turns)} times" if turns else ""
    enough = all(len(round_times(record)) >= FEWEST_ROUNDS for record in timed)
    few = "" if enough else f", where there were {FEWEST_ROUNDS} rounds or more"
    return (
        "Each call was repeated before timing until successive calls agreed within a tenth or a limit was "
        f"spent; the backends were then interleaved within each length{rounds}, in order and in reverse. "
        f"{_range(counts).capitalize()} calls per point were timed; times are the median over rounds of each "
        "round's median, with Student's 95 % interval over the rounds of this run, widened for neighbouring "
        f"rounds that correlate by up to {CORRELATION}{few}."
    )


def _memory(records: Sequence[Record]) -> str:
    methods = {
        record.memory_method for record in records if record.peak_bytes is not None and record.memory_method
    }
    if not methods:
        return ""
    ways = "; ".join(_MEMORY.get(method, method) for method in sorted(methods))
    return f"Peak memory is the most that a call held beyond its inputs and parameters, by {ways}."


def _errors(records: Sequence[Record]) -> str:
    errors = [record for record in records if record.case.kind == "error" and record.status == "ok"]
    draws = [
        len(values)
        for record in errors
        for values in (record.output_relative_error_draws or record.weights_relative_error_draws,)
        if values
    ]
    if not draws:
        return ""
    medians = (
        f"; for random features it is the median over {max(draws)} independent draws, with its 95 % interval"
        if max(draws) > 1
        else ""
    )
    return (
        "Errors are relative Frobenius norms against softmax attention computed by its formula in float64 on "
        f"the same inputs{medians}."
    )


def _training(records: Sequence[Record]) -> str:
    if not any(record.measured.get("train_steps") for record in records):
        return ""
    return (
        "Models were trained in turn, some steps of each, on the same batches and from the same weights for "
        "all shared parameters; bits per byte are means over windows of held-out text, and seconds exclude "
        "evaluation."
    )


def _swaps(records: Sequence[Record]) -> str:
    swapped = [record for record in records if record.case.kind == "swap" and record.status == "ok"]
    if not swapped:
        return ""
    return (
        f"The model read the first tokens of {_range([record.texts or 1 for record in swapped])} texts with "
        "its own attention, and with each backend in its place and the same weights; cosines, divergences "
        "and relative errors compare the two, computed in float64, and are means over texts and draws of "
        "random features."
    )


def _recall(records: Sequence[Record]) -> str:
    if not any(record.case.kind == "recall" for record in records):
        return ""
    return (
        "Every block began with the same weights for a seed and saw the same sequences in the same order, "
        "drawn anew for every step; its accuracy was measured on sequences outside the training set. The "
        "time of a step is the median over all steps of forward pass, backward pass and update, without "
        "drawing the sequences."
    )


def _lacking(records: Sequence[Record]) -> str:
    failed = sum(record.status != "ok" for record in records)
    return f"{failed} of {len(records)} points could not be measured." if failed else ""


def _each(cases: Sequence[Any], say: Callable[[Any], str]) -> str:
    return _listed(list(dict.fromkeys(map(say, cases))))


def _range(counts: Sequence[int]) -> str:
    return str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _listed(parts: Sequence[str]) -> str:
    """`a, b and c`; the first, the last and the count of more than twelve."""
    if len(parts) > 12:
        return f"{parts[0]} to {parts[-1]} ({len(parts)} in all)"
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
