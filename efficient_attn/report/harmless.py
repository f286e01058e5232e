"""Text that came from elsewhere, made harmless where it is shown: backend names and reasons are anybody's."""

import re

# What spreadsheets take for the start of a formula.
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r", "\0")
# Control characters, separators of lines, marks that turn the reading direction, what is no character or half
# of one, and the invisible tags in which text can be hidden.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)

# What means something to LaTeX, or prints as something else in its oldest font encoding.
_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    # After the end of a row these two would be an argument of it.
    **{sign: f"{{{sign}}}" for sign in "[*"},
    # A second hyphen or quotation mark would make another sign of the first.
    **{sign: f"{sign}{{}}" for sign in "-'`"},
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "²": r"\textsuperscript{2}",
    "–": "--",
}


def plain(text: str) -> str:
    """One line without control characters: nothing moves a cursor or turns the reading direction."""
    return _CONTROL.sub(" ", text)


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


def latex_cell(text: str) -> str:
    """Text that begins no command, ends no cell and needs no package."""
    return "".join(_LATEX.get(sign, sign) for sign in plain(text))
