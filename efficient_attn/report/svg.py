"""Figures as SVG inside a page: colours are the page's variables, and lines tell their names.

Matplotlib draws for white paper. Inside a page a colour becomes a variable, whose value the page chooses for
light and for dark; the letters stay text, in the page's own font.
"""

import re
from typing import Any
from xml.etree import ElementTree

from efficient_attn.report.palette import GRID, INK, MUTED, NIGHT, PAPER, readable_on
from efficient_attn.report.plot import to_bytes

_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_COLOUR = re.compile(r"#[0-9a-f]{6}")
_FONT = re.compile(r"font-family: [^;]*; ")

# Colours that have a meaning and not just a value.
_NAMED = {INK: "ink", "#000000": "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"}


def inline(figure: Any, *, name: str, title: str, description: str) -> str:
    """The figure as an `svg` element with title and description; `name` keeps its ids apart from others."""
    for number, line in enumerate(_lines(figure)):
        line.set_gid(f"line-{number}")
    names = {f"line-{number}": line.get_label() for number, line in enumerate(_lines(figure))}
    figure.patch.set_visible(False)
    root = ElementTree.fromstring(to_bytes(figure, "svg", salt=name, letters_as_paths=False))
    # Its metadata names the program that drew it, and its style sheet would hold for the whole page.
    for found in [*root.findall(f"{_SVG}metadata"), root.find(f"{_SVG}defs")]:
        if found is not None:
            root.remove(found)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        if element.get("id") in names:
            _tell(element, "title", names[element.get("id", "")], first=True)
        _restyle(element, name)
    for size in ("width", "height"):
        del root.attrib[size]
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title {name}-desc"}
    _tell(root, "desc", description, first=True).set("id", f"{name}-desc")
    _tell(root, "title", title, first=True).set("id", f"{name}-title")
    return ElementTree.tostring(root, encoding="unicode")


def swatch(line: Any) -> str:
    """A short piece of a line with its marker, for a legend; empty for a line that is not drawn."""
    from matplotlib.markers import MarkerStyle

    if line.get_linestyle() == "None":
        return ""
    colour = variable(_hex(line.get_color()))
    dash = line._unscaled_dash_pattern[1] if hasattr(line, "_unscaled_dash_pattern") else None
    dashes = f' stroke-dasharray="{" ".join(f"{length * 1.6:g}" for length in dash)}"' if dash else ""
    drawn = f'<path d="M1 7H33" stroke="{colour}" stroke-width="2.4"{dashes}/>'
    if line.get_marker() not in ("", "None", None):
        marker = MarkerStyle(line.get_marker())
        where: Any = marker.get_transform()
        corners: Any = marker.get_path().transformed(where.scale(9, -9).translate(17, 7)).to_polygons()
        points = " ".join(f"{x:.1f},{y:.1f}" for corner in corners for x, y in corner)
        drawn += f'<polygon points="{points}" fill="{colour}"/>'
    return f'<svg class="swatch" viewBox="0 0 34 14" fill="none" aria-hidden="true">{drawn}</svg>'


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


def _lines(figure: Any) -> list[Any]:
    """The lines that have a name; matplotlib hides those that begin with an underscore."""
    return [line for ax in figure.axes for line in ax.lines if not str(line.get_label()).startswith("_")]


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


def _tell(parent: ElementTree.Element, tag: str, text: str, *, first: bool) -> ElementTree.Element:
    told = ElementTree.Element(tag)
    told.text = text
    parent.insert(0 if first else len(parent), told)
    return told


def _hex(colour: Any) -> str:
    from matplotlib.colors import to_hex

    return str(to_hex(colour))
