"""Header of a run in environment.json: the study, its options as they were typed, and what it settled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from efficient_attn.errors import DataError, OptionError
from efficient_attn.measure.environment import without_home
from efficient_attn.report.table import short
from efficient_attn.runs.registry import find
from efficient_attn.runs.study import Settled, Study

STUDY, OPTIONS, SETTLED = "study", "options", "settled"

# Option of which a resumed run takes the settled value, and the entry with its reason.
SETTLED_THREADS, FREE_CORES = "threads", "free_cores"

# Longer texts are stored by their digest.
_LONGEST_TEXT = 1000


def header(study: Study) -> dict[str, Any]:
    """The header as entries of the environment."""
    options = {item.name: _encoded(getattr(study, item.name)) for item in fields(study)}
    settled = msgspec.json.decode(msgspec.json.encode(study.settled))
    return {STUDY: study.name(), OPTIONS: options, SETTLED: settled}


def stored_header(environment: Mapping[str, Any], *, source: str) -> tuple[Study, Settled] | None:
    """Study and decisions of a stored run, or None of records without. `source` names its file in errors."""
    if STUDY not in environment:
        return None
    try:
        kind = find(environment[STUDY])
        study = kind(**{name: _decoded(value) for name, value in environment.get(OPTIONS, {}).items()})
        # Several runs may have no options in common.
        if OPTIONS in environment:
            study.check()
        return study, msgspec.convert(environment.get(SETTLED, {}), kind.settled_type)
    except Exception as error:  # Whatever a check stumbles over stands in the file.
        raise DataError(f"The header of the run in {source} is damaged: {error}") from None


def requested(kind: type[Study], typed: Mapping[str, Any], stored: Mapping[str, Any], folder: Path) -> Study:
    """The checked study of the typed options, and of the stored ones of a run that goes on."""
    options = dict(typed)
    stored_header(stored, source=str(folder))
    if stored and stored.get(STUDY) != kind.name():
        raise DataError(_difference(folder, STUDY, stored.get(STUDY), kind.name()))
    values = stored.get(OPTIONS, {})
    for item in (item for item in fields(kind) if item.name in values):
        name, value = item.name, values[item.name]

        def refuse(label: str, name: str = name) -> Any:
            raise OptionError(f"{name}: {folder} was measured with {label!r}, an object; pass it again.")

        if name not in typed:
            options[name] = _decoded(value, refuse)
            if name == SETTLED_THREADS and value is None:
                # The load may be another one now.
                options[name] = stored.get(SETTLED, {}).get(name)
        elif not item.metadata.get("free") and _encoded(typed[name]) != value:
            raise DataError(_difference(folder, name, *map(_decoded, (value, _encoded(typed[name])))))
    study = kind(**options)
    study.check()
    return study


def _difference(folder: Path, name: str, stored: Any, now: Any) -> str:
    return f"out: {folder} has {name}={short(str(stored))}, not {short(str(now))}; name a new folder."


def _encoded(value: Any) -> Any:
    """The value as JSON, paths without the home of a person, objects by their labels."""
    if isinstance(value, str):
        digest = sha256(value.encode()).hexdigest()[:8]
        return {"object": f"text #{digest}"} if len(value) > _LONGEST_TEXT else without_home(value)
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and abs(value) < 1e308):
        return value
    if isinstance(value, Path):
        return {"path": without_home(str(value))}
    if isinstance(value, Mapping):
        return {str(name): _encoded(entry) for name, entry in value.items()}
    if isinstance(value, Sequence):
        return [_encoded(entry) for entry in value]
    name = getattr(value, "name", getattr(value, "__name__", None))
    return {"object": name if isinstance(name, str) else type(value).__name__}


def _decoded(value: Any, described: Callable[[str], Any] = str) -> Any:
    """The value that was typed, and in place of an object the description of its label."""
    if isinstance(value, list):
        return [_decoded(entry, described) for entry in value]
    if not isinstance(value, Mapping):
        return value
    match dict(value):
        case {"path": str() as path, **rest} if not rest:
            return Path(path)
        case {"object": str() as label, **rest} if not rest:
            return described(label)
    return {name: _decoded(entry, described) for name, entry in value.items()}
