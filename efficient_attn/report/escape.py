"""Escaping of external text for each output format."""

import re

# Characters that start a formula in a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r", "\0")
# Control characters, line separators, bidirectional marks, non-characters, surrogates and invisible tags.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
# Windows opens these names as devices, whatever follows the first dot.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", flags=re.IGNORECASE)
_LONGEST_SLUG = 80


def plain(text: str) -> str:
    """Replace control characters and bidirectional marks, so that one line remains."""
    return _CONTROL.sub(" ", text)


def short(text: str, most: int = 80) -> str:
    """Shorten a text to `most` characters: beginning, ellipsis, end."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 1]}…{text[-tail:]}"


def csv_cell(value: object) -> object:
    """Escape text that a spreadsheet would run, and write None as empty."""
    if not isinstance(value, str):
        return "" if value is None else value
    text = plain(value)
    return f"'{text}" if value.startswith(_FORMULA) or text.lstrip().startswith(_FORMULA) else text


def markdown_cell(text: str) -> str:
    """Escape characters of markup, mathematics and comments, and the ends of cells."""
    return re.sub(r"([\\`*_|<>\[\]{}#$%&~!])", r"\\\1", plain(text))


def markdown_line(text: str) -> str:
    """Escape a paragraph that could start as a list, heading or rule."""
    return re.sub(r"^\s*(\d*)([-+=.)])", r"\1\\\2", markdown_cell(text))


def slug(text: str) -> str:
    """Part of a file name in ASCII, never empty, hidden or a device."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text[:1000]).strip("-.")[:_LONGEST_SLUG].rstrip("-.")
    return name if name and not _DEVICES.match(name) else f"run-{name}".rstrip("-")
