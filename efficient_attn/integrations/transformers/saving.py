"""Loading a saved model with its backends, which plain `from_pretrained` omits.

A plan in the configuration assigns backends to attention modules; the tensors of the backends are stored with
the model's own. No saved code is run: backends are looked up by name, tensors read from safetensors.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from efficient_attn.backend import Backend
from efficient_attn.errors import DataError, DtypeError, OptionError, UnsupportedError
from efficient_attn.integrations.plan_files import check_plan
from efficient_attn.integrations.transformers.assignment import SavedTensors, build_plan
from efficient_attn.integrations.transformers.attachment import attach, install, second_names
from efficient_attn.integrations.transformers.attend import SUBMODULE
from efficient_attn.integrations.transformers.loading import (
    check_config,
    check_nothing_else,
    data_errors,
    model_class,
    read_config,
    read_model,
)
from efficient_attn.integrations.transformers.sites import find_sites, unwrap
from efficient_attn.limits import CONFIG_BYTES, check_header, read_bytes

M = TypeVar("M", bound=nn.Module)

# Files of `save` for objects of other libraries, which may save a part of the model.
_PLAN, _TENSORS = "efficient_attn.json", "efficient_attn.safetensors"


def save(model: nn.Module, folder: str | Path) -> None:
    """Save a model with its backends, by its `save_pretrained`.

    Objects of other libraries, such as a PeftModel that saves its adapter alone, get two files of their own
    for plan and tensors of the backends.

    Raises:
        UnsupportedError: If a backend has no registered name.
    """
    inner, path = unwrap(model), Path(folder)
    plan = getattr(inner.config, SUBMODULE, None)
    if plan is None:
        raise UnsupportedError(
            "No backend with a registered name is attached; save_pretrained saves the model without backends."
        )
    saving: Any = model
    saving.save_pretrained(path)
    if isinstance(model, PreTrainedModel):
        # Files of an earlier adapter in the same folder would be read in place of the model's own.
        for name in (_PLAN, _TENSORS):
            (path / name).unlink(missing_ok=True)
    else:
        save_file(_backend_tensors(inner), path / _TENSORS)
        (path / _PLAN).write_text(json.dumps(plan), encoding="utf-8")


def _backend_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors of all backends, tied tensors once."""
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, Backend) and path.endswith(f".{SUBMODULE}"):
            tied = second_names(module)
            state = {name: x.contiguous() for name, x in module.state_dict().items() if name not in tied}
            tensors |= {f"{path}.{name}": x for name, x in state.items()}
    return tensors


def load(
    folder: str | Path, *, into: M | None = None, plan: str | Path | None = None, **arguments: Any
) -> M | PreTrainedModel:
    """Load a saved model with its backends.

    Args:
        folder: A local folder.
        into: A model without backends that its own library has loaded from the folder, such as a PeftModel or
            a SentenceTransformer; it gets the backends, in place.
        plan: A file of backends by layer, for a folder without backends: `layers.json` of `advise`.
        arguments: For `from_pretrained`: dtype, device_map, …

    Raises:
        DataError: If the folder holds no such model, or tensors or plan do not match it.
        DtypeError: If `folder` is not a path.
    """
    if not isinstance(folder, (str, Path)):
        raise DtypeError(f"folder is a path, not {folder!r}.")
    path = Path(folder)
    if into is not None:
        if arguments or plan is not None:
            raise OptionError(
                f"{next(iter(arguments), 'plan')}=…: the model given by into=… is loaded already."
            )
        _attach_saved(unwrap(into), path)
        return into
    if not (path / "config.json").is_file():
        raise DataError(f"{folder} holds no config.json; load reads a folder that save_pretrained wrote.")
    check_config(path)
    for file in path.glob("*.safetensors"):
        check_header(file)
    config = read_config(path)
    saved = getattr(config, SUBMODULE, None)
    if plan is not None and saved is not None:
        raise OptionError(
            f"plan={plan}: {folder} holds a model with backends of its own; load it without plan."
        )
    layers = None if plan is not None else _checked_layers(saved, path / "config.json")
    kind = model_class(config, path)
    model, report = read_model(path, kind, **arguments)
    check_nothing_else(path, report, ours=f".{SUBMODULE}.")
    if layers is None:
        return attach(model, plan)
    _install_plan(model, layers, path / "config.json")
    return model


def _attach_saved(model: PreTrainedModel, path: Path) -> None:
    """Attach the saved backends to a model without its backends."""
    file = path / _PLAN if (path / _PLAN).is_file() else path / "config.json"
    if not file.is_file():
        raise DataError(f"{path} holds neither {_PLAN} nor config.json; load reads folders that save wrote.")
    with data_errors(f"Cannot read {file}"):
        plan = json.loads(read_bytes(file, CONFIG_BYTES))
    if file.name != _PLAN and isinstance(plan, dict):
        plan = plan.get(SUBMODULE)
    for weights in path.glob("*.safetensors"):
        check_header(weights)
    _install_plan(model, _checked_layers(plan, file), file)


def _checked_layers(plan: Any, file: Path) -> dict[str, dict[str, Any]]:
    """The layers of a plan, in the form that `attach` writes."""
    if plan is None:
        raise DataError(
            f"{file} names no backends (efficient_attn): they had no registered name, or none "
            "was attached when the model was saved. Use from_pretrained and attach."
        )
    return check_plan(plan, str(file))


def _install_plan(model: PreTrainedModel, layers: dict[str, dict[str, Any]], plan: Path) -> None:
    """Install the layers of a plan with its saved tensors."""
    sites, folder = find_sites(model), plan.parent
    with data_errors(f"Cannot read the safetensors of {folder}"):
        tensors = dict(_saved_tensors(plan))
    saved: SavedTensors = {site.path: {} for site in sites}
    for name, tensor in tensors.items():
        path, _, rest = name.partition(f".{SUBMODULE}.")
        if path in saved:
            saved[path][rest] = tensor
    backends = build_plan(model, sites, layers, str(plan), saved)
    for path, backend in backends.items():
        state = saved[path]
        state |= {name: state[first] for name, first in second_names(backend).items() if first in state}
        with data_errors(
            f"{folder}: the tensors saved for {path}.{SUBMODULE} do not fit backend {backend.spec.name!r}"
        ):
            backend.load_state_dict(state)
    install(model, sites, backends)


def _saved_tensors(plan: Path) -> Iterator[tuple[str, Tensor]]:
    folder = plan.parent
    for file in [folder / _TENSORS] if plan.name == _PLAN else sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                if f".{SUBMODULE}." in name:
                    yield name, opened.get_tensor(name)
