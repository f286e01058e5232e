"""Citations of this package and of the papers behind backends or a run, in BibTeX."""

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from efficient_attn.errors import OptionError
from efficient_attn.measure.record import Record
from efficient_attn.report.methods import entry, papers
from efficient_attn.studies.results import Results

ADDRESS = "https://github.com/efficient-attn/efficient-attn"


def cite(*used: str | Results) -> str:
    """BibTeX of this package, and of the papers of the backends that were used.

    A backend without a paper adds no entry; one of another package is cited by the address that it declares,
    but not for results, which import nothing. The version is that of the installed package, or the one that
    measured the results.

    Args:
        used: Names of backends, and results of measurements.

    Raises:
        UnknownNameError: If there is no such backend.
        OptionError: If an argument is neither a name nor results.
    """
    versions: list[str] = []
    names: list[str] = []
    foreign: list[tuple[str, str]] = []
    for one in used:
        if isinstance(one, str):
            names.append(one)
            foreign += _foreign(one)
        elif isinstance(one, Results):
            names += _backends(one.records)
            versions += _version(one.environment)
        else:
            raise OptionError(f"cite takes names of backends and results, not {type(one).__name__}.")
    version = ", ".join(dict.fromkeys(versions)) or import_module("efficient_attn").__version__
    tool = {
        "title": "{efficient-attn: Efficient Attention, Measured Side by Side}",
        "author": "{The efficient-attn developers}",
        "version": version,
        "url": ADDRESS,
    }
    others = [
        entry("misc", re.sub(r"[^\w.-]+", "-", name), {"title": f"{{{name}}}", "url": url})
        for name, url in foreign
    ]
    found = [paper.text for paper in papers(names)]
    return "\n\n".join([entry("software", "efficient_attn", tool), *found, *others])


def _backends(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(record.case.backend for record in records))


def _version(environment: Mapping[str, Any]) -> Iterator[str]:
    packages = environment.get("packages")
    if isinstance(packages, dict) and (version := packages.get("efficient-attn")):
        yield str(version)


def _foreign(name: str) -> Iterator[tuple[str, str]]:
    """Name and address of the paper of a backend of another package."""
    if not papers([name]):
        # Names of papers that are known need no torch.
        from efficient_attn.backends import spec

        if address := spec(name).paper:
            yield name, address
