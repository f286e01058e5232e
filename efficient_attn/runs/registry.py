"""Studies by name: a file or folder in `efficient_attn/studies` is one. Nothing else needs editing."""

import importlib
import pkgutil
from functools import cache
from typing import Any

from efficient_attn.errors import DataError, UnknownNameError
from efficient_attn.runs.study import Study

_FOLDER = "efficient_attn.studies"
_SCHEMA = "https://json-schema.org/draft/2020-12/schema"


@cache
def studies() -> dict[str, type[Study]]:
    """Every study by its name. Records can hold its quantities from then on.

    Raises:
        DataError: If something else lies in the folder.
    """
    paths = importlib.import_module(_FOLDER).__path__
    registered = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(paths)):
        classes = vars(importlib.import_module(f"{_FOLDER}.{name}")).values()
        subclasses = [x for x in classes if isinstance(x, type) and issubclass(x, Study) and x.name() == name]
        if len(subclasses) != 1:
            raise DataError(
                f"studies/{name} has {len(subclasses)} subclasses of Study, not one: a helper of one study "
                "belongs in the folder of that study, of several in efficient_attn/runs."
            )
        registered[name] = subclasses[0]
    return registered


def find(name: str) -> type[Study]:
    """The study of that name."""
    if name not in studies():
        raise UnknownNameError("study", name, studies())
    return studies()[name]


def records_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a line of records.jsonl."""
    import msgspec

    from efficient_attn.measure.quantities import FIELDS, KINDS
    from efficient_attn.measure.record import line_type

    studies()
    (line,) = msgspec.json.schema(line_type(len(FIELDS), len(KINDS)))["$defs"].values()
    return {"title": "A record of efficient-attn", "$schema": _SCHEMA, **line}
