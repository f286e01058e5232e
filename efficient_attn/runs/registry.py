"""Studies by name, found as files and folders of `efficient_attn/studies`."""

import importlib
import pkgutil
from functools import cache
from typing import Any

from efficient_attn.errors import DataError, UnknownNameError
from efficient_attn.measure.record import Record
from efficient_attn.runs.study import Study

_FOLDER = "efficient_attn.studies"
_SCHEMA = "https://json-schema.org/draft/2020-12/schema"


@cache
def studies() -> dict[str, type[Study]]:
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
    if name not in studies():
        raise UnknownNameError("study", name, studies())
    return studies()[name]


@cache
def any_record() -> type[Record]:
    """Class of records with the quantities of all studies, for files that do not name theirs."""
    classes = dict.fromkeys(study.record for study in studies().values())
    derived = [x for x in classes if not any(issubclass(y, x) and y is not x for y in classes)]
    return derived[0] if len(derived) == 1 else type("AnyRecord", (*derived,), {})


def records_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a line of records.jsonl."""
    import msgspec

    (line,) = msgspec.json.schema(any_record().line_type())["$defs"].values()
    return {"title": "A record of efficient-attn", "$schema": _SCHEMA, **line}
