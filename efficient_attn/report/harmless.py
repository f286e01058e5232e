"""Text that came from elsewhere, made harmless where it is shown: backend names and reasons are anybody's."""

import re

# What spreadsheets take for the start of a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\0")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """One line without control characters: nothing moves a cursor or turns the reading direction."""
    return _CONTROL.sub(" ", text)


def csv_cell(value: object) -> object:
    """Text that no spreadsheet runs; numbers stay numbers, None is empty."""
    if not isinstance(value, str):
        return "" if value is None else value
    text = plain(value)
    return f"'{text}" if value.startswith(_FORMULA) or text.startswith(_FORMULA) else text


def markdown_cell(text: str) -> str:
    """Text that ends no cell and begins no markup."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", plain(text))
