"""A model with inputs, as the study sees it, and the variants that replace its attention."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from efficient_attn.contained import trial
from efficient_attn.runner.calls import MEAN
from efficient_attn.runner.record import Case
from efficient_attn.runner.sizes import MEAN_OF_VALUES
from efficient_attn.runner.variants import YARDSTICK, Variant, select


class Subject(Protocol):
    """A model whose attention can be replaced, with the inputs that it runs on."""

    @property
    def model(self) -> Any:
        """Module that holds the backends while they replace its attention."""

    @property
    def shared(self) -> Mapping[str, Any]:
        """Fields common to all cases."""

    @property
    def about(self) -> Mapping[str, Any]:
        """Origin of model and inputs."""

    @property
    def calibrated_on(self) -> str:
        """Name of the inputs of a calibration."""

    @property
    def num_texts(self) -> int | None:
        """Number of texts; None: the model has inputs of another form."""

    @property
    def layers(self) -> Sequence[int]:
        """Numbers of the layers that get a backend."""

    @property
    def notes(self) -> list[str]:
        """Remarks on attention that stays exact."""

    @property
    def exact(self) -> Sequence[Any]:
        """Outputs with the model's own attention, one per text."""

    def forward(self) -> Any:
        """The timed call."""

    def distances(self, number: int) -> dict[str, float]:
        """Distances of the present outputs from the exact ones on the text of that number, by quantity."""

    def replaced(
        self, variant: Variant, draw: int = 0, layer: int | None = None
    ) -> AbstractContextManager[bool]:
        """The model with the variant in its layers, and whether calibration was required."""

    def fitted(self, variant: Variant) -> Variant:
        """The variant with the options that the model requires."""

    def build(self, variant: Variant) -> object:
        """Build the variant for all layers, to check its options."""

    def case(self, kind: str, variant: Variant, layer: int | None = None) -> Case:
        """The case of a measurement."""


def candidates(chosen: Sequence[Variant], subject: Subject) -> tuple[Variant, ...]:
    """Exact attention, the uniform-attention baseline, then the other variants, each built once.

    Raises:
        OptionError: If a set value never works.
    """
    exact = [variant for variant in chosen if variant.backend == YARDSTICK] or select([YARDSTICK])
    others = [subject.fitted(variant) for variant in chosen if variant.backend != YARDSTICK]
    for one in others:
        if one.label != one.backend:
            with trial():
                subject.build(one)
    mean = Variant(backend=MEAN_OF_VALUES, label=MEAN_OF_VALUES, target=MEAN)
    return (*exact, mean, *others)
