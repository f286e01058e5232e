"""Headings and notes of tables that several studies share."""

from collections.abc import Iterable

from efficient_attn.report.error_table import describe
from efficient_attn.runner.records import Case, Record

QUEUED_NOTE = (
    "Device time: queued calls, which wait for no launch, with a {} L2 cache. Time: single calls on an idle "
    "device, launches included."
)


def setting(case: Case) -> str:
    """`12 heads of 32, float32, 2 CPU threads`, and further properties that differ from the defaults."""
    heads = "1 head" if case.num_heads == 1 else f"{case.num_heads} heads"
    threads = "1 CPU thread" if case.threads == 1 else f"{case.threads} CPU threads"
    parts = [
        f"{heads} of {case.head_dim}",
        case.dtype,
        threads if case.device == "cpu" else case.device,
        "" if case.batch == 1 else f"batch {case.batch}",
        "causal" if case.causal else "",
        "forward and backward" if case.backward else "",
    ]
    return ", ".join(filter(None, parts))


def heading(case: Case) -> str:
    """`encoder, layer 1; 512 tokens, 12 heads of 32, float32, 2 CPU threads`."""
    return f"{describe(case.inputs)}; {case.tokens} tokens, {setting(case)}"


def failure_notes(records: Iterable[Record]) -> tuple[str, ...]:
    """One line per backend and reason."""
    failed = (f"{one.case.label}: {one.status}: {one.reason}" for one in records if one.status != "ok")
    return tuple(dict.fromkeys(failed))


def calibration_note(records: Iterable[Record]) -> tuple[str, ...]:
    """The inputs of a calibration and the backends that had one, if any."""
    found = {one.case.label: one.calibrated_on for one in records if one.calibrated_on}
    if not found:
        return ()
    return (f"Calibrated on {next(iter(found.values()))}, outside the time: {', '.join(found)}.",)
