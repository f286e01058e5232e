"""Checkpoints of adaptations, by which an interrupted training continues."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from efficient_attn.errors import DataError
from efficient_attn.integrations.transformers.distillation import Distillation
from efficient_attn.integrations.transformers.loading import data_errors
from efficient_attn.report.files import slug, write
from efficient_attn.tensor_headers import load_tensors, read_header

CHECKPOINTS = "checkpoints"
_KIND = "efficient-attn adaptation 1"


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint of one adaptation.

    Attributes:
        folder: Folder of the run; None: nothing is kept.
        label: Label of the adapted variant.
        about: All that the adaptation follows from.
    """

    folder: Path | None
    label: str
    about: Mapping[str, Any]

    def save(self, distillation: Distillation, seconds_s: float) -> None:
        if (path := self._path) is None or distillation.step == 0:
            return
        path.parent.mkdir(exist_ok=True)
        progress = {"seconds_s": seconds_s, **distillation.progress}
        tensors = {
            name: tensor.detach().cpu().contiguous() for name, tensor in distillation.tensors().items()
        }
        text = json.dumps({**self.about, "progress": progress}, allow_nan=False, ensure_ascii=False)
        metadata = {"format": _KIND, "about": text, "sha256": checksum(tensors, text)}
        write(path, save(tensors, metadata=metadata))

    def restore(self, distillation: Distillation) -> float:
        """Seconds of an earlier training, which the distillation continues; 0 without one.

        Raises:
            DataError: If its checkpoint is damaged, or of other settings.
        """
        if (path := self._path) is None or not path.exists():
            return 0.0
        described, metadata = read_header(path)
        tensors = load_tensors(path, described)
        if metadata.get("format") != _KIND or metadata.get("sha256") != checksum(
            tensors, metadata.get("about", "")
        ):
            raise DataError(f"{path} is damaged or no checkpoint; delete it to adapt {self.label} again.")
        about = json.loads(metadata["about"])
        progress = about.pop("progress")
        if about != self.about:
            raise DataError(f"{path} is of another adaptation; name a new folder.")
        with data_errors(f"{path} does not fit {self.label}"):
            distillation.restore(tensors, progress)
        return float(progress["seconds_s"])

    @property
    def _path(self) -> Path | None:
        return None if self.folder is None else self.folder / CHECKPOINTS / f"{slug(self.label)}.safetensors"


def checksum(tensors: Mapping[str, Tensor], about: str) -> str:
    """SHA-256 of the description and of names, dtypes, shapes and bytes of all tensors."""
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
