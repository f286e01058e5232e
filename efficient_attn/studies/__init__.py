"""One file or folder per study. One that is placed here is registered; nothing else needs editing.

A file holds `STUDY` and, where the defaults do not suffice, functions `tables`, `sentences` and `plots` of
the records; a folder holds them in its `__init__.py` and `view.py`.
"""

import importlib
import pkgutil
from functools import cache
from typing import Any

from efficient_attn.errors import UnknownNameError
from efficient_attn.studies.study import Study

# Modules of this folder that are no studies.
_MACHINERY = {"audit", "diff", "engine", "gpu_check", "options", "progress", "results", "run_folder", "show"}
_MACHINERY |= {"study", "view", "workload"}

_SCHEMA = "https://json-schema.org/draft/2020-12/schema"


@cache
def studies() -> dict[str, Study]:
    """Every study by its name; records can hold its quantities from then on."""
    names = sorted({module.name for module in pkgutil.iter_modules(__path__)} - _MACHINERY)
    registered = [importlib.import_module(f"{__name__}.{name}").STUDY for name in names]
    return {study.name: study for study in registered}


def find(name: str) -> Study:
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
