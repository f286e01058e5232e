"""Records for display: every text is one escaped line of limited length."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from efficient_attn.report.escape import plain
from efficient_attn.runner.record import Case, Record, replace

_T = TypeVar("_T", Case, Record)

# Display limits in characters; files of records keep the full texts.
_LONGEST_NAME, _LONGEST_REASON, _LONGEST_WORD = 80, 300, 40


def readable(records: Iterable[Record]) -> list[Record]:
    """The records with displayable texts; labels that would look the same are numbered."""
    labels: dict[str, str] = {}
    return [_readable(record, labels) for record in records]


def short(text: str, most: int = _LONGEST_NAME) -> str:
    """The text, or its beginning, an ellipsis and its end, `most` characters in all."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 1]}…{text[-tail:]}"


def _readable(record: Record, labels: dict[str, str]) -> Record:
    label = record.case.label
    if label not in labels:
        labels[label] = _unlike(short(plain(label)), label, set(labels.values()))
    # The description of training inputs is longer than others.
    inputs = short(plain(record.case.inputs))
    case = _changed(record.case, record.case.row(), label=labels[label], inputs=inputs)
    reason = None if record.reason is None else short(plain(record.reason), _LONGEST_REASON)
    texts = {**record.measured, "status": record.status}
    return _changed(record, texts, case=case, reason=reason)


def _unlike(shown: str, label: str, taken: set[str]) -> str:
    """The displayed label; a number distinguishes labels that would look the same."""
    number, wanted = 1, shown
    while wanted in taken and wanted != label:
        number += 1
        wanted = f"{shown} ({number})"
    return wanted


def _changed(item: _T, known: Mapping[str, object], **values: Any) -> _T:
    """A copy with these values, and every other text short and plain; the item itself if nothing differs."""
    texts = {
        name: short(plain(value), _LONGEST_WORD) for name, value in known.items() if isinstance(value, str)
    }
    new = {name: value for name, value in (texts | values).items() if getattr(item, name) != value}
    return replace(item, **new) if new else item
