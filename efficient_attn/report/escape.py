"""Escaping of external text, such as backend names and reasons, for each output format."""

import re

# Characters that start a formula in a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r", "\0")
# Control characters, line separators, bidirectional marks, non-characters, surrogates and invisible tags.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def plain(text: str) -> str:
    """One line without control characters and bidirectional marks."""
    return _CONTROL.sub(" ", text)


def short(text: str, most: int = 80) -> str:
    """The text, or its beginning, an ellipsis and its end, `most` characters in all."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 1]}…{text[-tail:]}"


def csv_cell(value: object) -> object:
    """Text that no spreadsheet runs; numbers stay numbers, None is empty."""
    if not isinstance(value, str):
        return "" if value is None else value
    text = plain(value)
    return f"'{text}" if value.startswith(_FORMULA) or text.lstrip().startswith(_FORMULA) else text


def markdown_cell(text: str) -> str:
    """Text that ends no cell and begins no markup, no mathematics and no comment."""
    return re.sub(r"([\\`*_|<>\[\]{}#$%&~!])", r"\\\1", plain(text))


def markdown_line(text: str) -> str:
    """Text that is no list, heading or line at the start of a paragraph either."""
    return re.sub(r"^\s*(\d*)([-+=.)])", r"\1\\\2", markdown_cell(text))
