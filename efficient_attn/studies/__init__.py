"""One folder per study. A folder placed here is registered; nothing else needs editing.

The folder holds `STUDY` in its `__init__.py` and, as far as the defaults do not suffice, `view.py`: tables,
sentences, rows and plots computed from the records.
"""

import importlib
import pkgutil
from functools import cache
from typing import Any

from efficient_attn.errors import UnknownNameError
from efficient_attn.studies.study import Study


@cache
def studies() -> dict[str, Study]:
    """Every study by its name; records can hold its quantities from then on."""
    folders = (folder.name for folder in pkgutil.iter_modules(__path__) if folder.ispkg)
    found = [importlib.import_module(f"{__name__}.{name}").STUDY for name in sorted(folders)]
    return {study.name: study for study in found}


def find(name: str) -> Study:
    """The study of that name.

    Raises:
        UnknownNameError: If there is none.
    """
    if name not in studies():
        raise UnknownNameError("study", name, studies())
    return studies()[name]


def records_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of one line of a file of records, with the quantities of every study."""
    from efficient_attn.measure import records

    studies()
    return records.records_schema()
