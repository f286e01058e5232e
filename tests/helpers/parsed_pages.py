"""Elements, ids, references and text of a page."""

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """A parsed page: elements with the names of their attributes, ids, references, text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.ids, self.references, self.texts = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, tuple(sorted(name for name, _ in attributes))))
        self.ids += [value for name, value in attributes if name == "id"]
        self.references += [value for name, value in attributes if name in ("href", "src")]
        self.references += re.findall(r"url\(([^)]*)\)", str(dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())
