"""Pictures of the docs show the records they name: none is stale, missing or left over."""

import json
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
IMAGES = runpy.run_path(str(DOCS / "images.py"))
NAMES: list[str] = IMAGES["names"]()


def known(name: str) -> dict[str, str]:
    """Digests of a picture, as it was drawn."""
    return json.loads((DOCS / "images/sources.json").read_text(encoding="utf-8"))[name]


def test_every_picture_is_drawn_by_the_script_and_stands_on_a_page() -> None:
    assert {path.stem for path in (DOCS / "images").glob("*.png")} == set(NAMES)
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    assert [name for name in NAMES if f"(images/{name}.png)" not in pages] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_was_drawn_from_the_records_as_they_are(name: str) -> None:
    assert known(name)["records"] == IMAGES["digest"](name), f"run: python docs/images.py {name}"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_picture_has_the_texts_and_points_that_are_drawn_now(name: str) -> None:
    content = IMAGES["content"](name, IMAGES["figure"](name))
    assert known(name)["content"] == content, f"run: python docs/images.py {name}"
