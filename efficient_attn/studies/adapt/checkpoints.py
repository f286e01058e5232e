"""Checkpoints of adaptations, by which an interrupted training continues."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efficient_attn.errors import DataError
from efficient_attn.integrations.transformers.distillation import Distillation
from efficient_attn.integrations.transformers.loading import data_errors
from efficient_attn.report.files import slug
from efficient_attn.studies.train.checkpoints import CHECKPOINTS, checksum, write_tensors
from efficient_attn.tensor_headers import load_tensors, read_header

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
        write_tensors(path, distillation.tensors(), {**self.about, "progress": progress}, kind=_KIND)

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
