"""Figures as SVG inside a page: colours are the page's variables, and lines have tooltips.

Matplotlib draws for white paper. Inside a page a colour becomes a variable, whose value the page chooses for
light and for dark; the letters stay text, in the page's own font.
"""

import re
from typing import Any
from xml.etree import ElementTree

from efficient_attn.report.escape import plain
from efficient_attn.report.palette import GRID, INK, MUTED, NIGHT, PAPER, readable_on
from efficient_attn.report.save import to_bytes

_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_COLOUR = re.compile(r"#[0-9a-f]{6}")
_FONT = re.compile(r"font-family: [^;]*; ")

# Colours that have a meaning and not just a value.
_NAMED = {INK: "ink", "#000000": "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"}


def inline(figure: Any, *, name: str, title: str) -> str:
    """The figure as an `svg` element with title and description; `name` keeps its ids apart from others."""
    lines = [line for ax in figure.axes for line in ax.lines if not str(line.get_label()).startswith("_")]
    for number, line in enumerate(lines):
        line.set_gid(f"line-{number}")
    names = {line.get_gid(): line.get_label() for line in lines}
    figure.patch.set_visible(False)
    root = ElementTree.fromstring(to_bytes(figure, "svg", salt=name))
    figure.patch.set_visible(True)
    # Its metadata names the program that drew it, and its style sheet would hold for the whole page.
    for found in [*root.findall(f"{_SVG}metadata"), root.find(f"{_SVG}defs")]:
        if found is not None:
            root.remove(found)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        if element.get("id") in names:
            _tell(element, "title", names[element.get("id", "")])
        _restyle(element, name)
    for size in ("width", "height"):
        del root.attrib[size]
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title {name}-desc"}
    described = f"Lines of {', '.join(dict.fromkeys(names.values()))}; the numbers are in the tables."
    _tell(root, "desc", plain(described)).set("id", f"{name}-desc")
    _tell(root, "title", plain(title)).set("id", f"{name}-title")
    return ElementTree.tostring(root, encoding="unicode")


def variable(colour: str) -> str:
    """The page's variable for a colour: `var(--c-0072b2, #0072b2)`."""
    return f"var(--{_NAMED.get(colour) or f'c-{colour[1:]}'}, {colour})"


def variables(markup: str) -> dict[str, tuple[str, str]]:
    """{variable: (value on white, value at night)} for the colours of lines in the markup."""
    found = sorted(set(re.findall(r"var\(--c-([0-9a-f]{6}), ", markup)))
    return {
        f"--c-{colour}": (readable_on(PAPER, f"#{colour}"), readable_on(NIGHT, f"#{colour}", contrast=4.5))
        for colour in found
    }


def _restyle(element: ElementTree.Element, name: str) -> None:
    """Colours to variables, the page's font, and ids that no other figure of the page has."""
    if "id" in element.attrib:
        element.set("id", f"{name}-{element.attrib['id']}")
    if _LINK in element.attrib:
        element.set("href", "#" + f"{name}-{element.attrib.pop(_LINK)[1:]}")
    for key in ("clip-path", "style", "fill", "stroke"):
        if key not in element.attrib:
            continue
        value = element.attrib[key].replace("url(#", f"url(#{name}-")
        if element.tag == "text":
            # Coloured letters would need more contrast than a line.
            value = _COLOUR.sub(lambda found: found[0] if found[0] in _NAMED else INK, value)
            value = _FONT.sub("", value)
        element.set(key, _COLOUR.sub(lambda found: variable(found[0]), value))


def _tell(parent: ElementTree.Element, tag: str, text: str) -> ElementTree.Element:
    told = ElementTree.Element(tag)
    told.text = text
    parent.insert(0, told)
    return told
