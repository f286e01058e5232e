"""A model with its inputs, as measurements of swapped attention see it."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from efficient_attn.measure.variants import OWN, Variant

# The model with its own attention.
OWN_ATTENTION = Variant(backend=OWN, label=OWN, target=OWN)


class ModelSubject(Protocol):
    """A model with its inputs: `model.TextSubject` or `called.CallSubject`.

    Attributes:
        shared: Fields of all cases.
        about: Names and digests of the model and its inputs.
        layers: Layers that get a backend; `sliding` are those with a window in the model.
        loss: Quantity by which plans are chosen.
        calibrated_on: Inputs of the calibration.
        original: The model with its own attention, as rows name it.
        num_texts: Number of texts; None: the model makes its inputs.
    """

    @property
    def model(self) -> Any: ...
    @property
    def shared(self) -> Mapping[str, Any]: ...
    @property
    def about(self) -> Mapping[str, Any]: ...
    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def sliding(self) -> tuple[int, ...]: ...
    @property
    def loss(self) -> str: ...
    @property
    def calibrated_on(self) -> str: ...
    @property
    def original(self) -> Variant: ...
    @property
    def num_texts(self) -> int | None: ...
    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def exact(self) -> Sequence[Any]:
        """Outputs of the model with its own attention, one per text."""

    def forward(self) -> Any:
        """The timed call."""

    def distances(self, number: int) -> dict[str, float]:
        """Distances of the present outputs on one text from the exact ones."""

    def replaced(
        self, variant: Variant, draw: int = 0, layer: int | None = None
    ) -> AbstractContextManager[bool]:
        """The model with the variant in all layers or one, and whether it was calibrated."""

    def plan(self, variant: Variant) -> dict[str, Any] | None:
        """The plan that `attach` takes, or None if a backend has no registered name."""

    def fitted(self, variant: Variant) -> Variant:
        """The variant with what the model prescribes."""


def choices(
    subject: ModelSubject, variant: Variant, layer: int | None = None
) -> Mapping[int, tuple[Any, Mapping[str, Any]]]:
    """Backend and options of each replaced layer."""
    if isinstance(variant.target, Mapping):
        return variant.target
    layers = subject.layers if layer is None else (layer,)
    return dict.fromkeys(layers, (variant.target, variant.options))
