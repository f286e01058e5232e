"""Loading a saved model with its backends, which plain `from_pretrained` omits.

A plan in the configuration assigns backends to attention modules; the tensors of the backends are stored with
the model's own. No saved code is run: backends are looked up by name, tensors read from safetensors.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from efficient_attn.errors import DataError, DtypeError
from efficient_attn.integrations.plan_files import check_plan
from efficient_attn.integrations.transformers.assignment import SavedTensors, build_plan
from efficient_attn.integrations.transformers.attachment import install, second_names
from efficient_attn.integrations.transformers.attend import SUBMODULE
from efficient_attn.integrations.transformers.loading import (
    check_config,
    check_nothing_else,
    data_errors,
    model_class,
    read_config,
    read_model,
)
from efficient_attn.integrations.transformers.sites import find_sites
from efficient_attn.limits import check_header


def load(folder: str | Path, **arguments: Any) -> PreTrainedModel:
    """Load a model that was saved with its backends by `save_pretrained`.

    Args:
        folder: A local folder.
        arguments: For `from_pretrained`: dtype, device_map, …

    Raises:
        DataError: If the folder holds no such model, or tensors or plan do not match it.
        DtypeError: If `folder` is not a path.
    """
    if not isinstance(folder, (str, Path)):
        raise DtypeError(f"folder is a path, not {folder!r}.")
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise DataError(f"{folder} holds no config.json; load reads a folder that save_pretrained wrote.")
    check_config(path)
    for file in path.glob("*.safetensors"):
        check_header(file)
    config = read_config(path)
    plan, source = getattr(config, SUBMODULE, None), path / "config.json"
    if plan is None:
        raise DataError(
            f"{source} names no backends (efficient_attn): they had no registered name, or none was attached "
            "when the model was saved. Use from_pretrained and attach."
        )
    layers = check_plan(plan, str(source))
    model, report = read_model(path, model_class(config, path), **arguments)
    check_nothing_else(path, report, ours=f".{SUBMODULE}.")
    _install_plan(model, layers, source)
    return model


def _install_plan(model: PreTrainedModel, layers: dict[str, dict[str, Any]], plan: Path) -> None:
    """Install the layers of a plan with its saved tensors."""
    sites, folder = find_sites(model), plan.parent
    with data_errors(f"Cannot read the safetensors of {folder}"):
        tensors = dict(_saved_tensors(folder))
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


def _saved_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                if f".{SUBMODULE}." in name:
                    yield name, opened.get_tensor(name)
