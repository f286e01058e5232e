"""Training of small models that differ by their attention alone."""

from collections.abc import Iterator

from efficient_attn.runner.quantity import MATTERS, MATTERS_OF_BITS, QUANTITIES, Quantity, setting
from efficient_attn.studies.study import Study
from efficient_attn.studies.train.plan import plan


def _curves(unit: str, held_out: str) -> Iterator[Quantity]:
    """Training loss and held-out loss, with one entry for each evaluation."""
    bits = f"bits per {unit}"
    yield Quantity(
        name=f"train_bits_per_{unit}",
        unit=bits,
        meaning=f"Training loss in {bits} since the previous evaluation, of each batch before its update.",
        type="numbers",
        scatter="seeds",
        threshold=MATTERS_OF_BITS,
        entry="last",
    )
    yield Quantity(
        name=f"held_out_bits_per_{unit}",
        unit=bits,
        meaning=f"{bits.capitalize()} of {held_out}.",
        type="numbers",
        scatter="windows",
        threshold=MATTERS_OF_BITS,
        samples=f"held_out_bits_per_{unit}_windows",
        entry="last",
    )


STUDY = Study(
    name="train",
    plan=plan,
    folder=__name__,
    kinds=("train",),
    quantities=(
        Quantity(
            name="train_step_s",
            unit="s",
            meaning="Total time of all training steps up to each evaluation.",
            type="numbers",
            scatter="rounds",
            threshold=MATTERS,
            record_field="train_seconds_s",
        ),
        setting(
            "train_steps",
            "",
            "Number of training steps before each evaluation; curves of training have one entry for each.",
            type="whole numbers",
            entry="last",
        ),
        *_curves("byte", "the held-out text, mean over all windows"),
        *_curves("token", "sequences outside the training set, mean over sequences"),
        QUANTITIES["accuracy"],
        QUANTITIES["answers"],
        Quantity(
            name="sequence_accuracy",
            unit="share",
            meaning="Share of sequences that beam search decodes without a mistake, after training.",
            better="more",
            scatter="seeds",
            threshold=MATTERS,
        ),
    ),
    budget="280s",
)
