"""Training of small language models that differ by their attention alone."""

from efficient_attn.runner.quantity import MATTERS, MATTERS_OF_BITS, Quantity, setting
from efficient_attn.studies.study import Study
from efficient_attn.studies.train.plan import plan

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
        Quantity(
            name="train_bits_per_byte",
            unit="bits per byte",
            meaning="Bits per byte of the batches since the previous evaluation, each before its update.",
            type="numbers",
            scatter="seeds",
            threshold=MATTERS_OF_BITS,
            entry="last",
        ),
        Quantity(
            name="held_out_bits_per_byte",
            unit="bits per byte",
            meaning="Bits per byte of the held-out text, mean over all windows.",
            type="numbers",
            scatter="windows",
            threshold=MATTERS_OF_BITS,
            samples="held_out_bits_per_byte_windows",
            entry="last",
        ),
    ),
    budget="280s",
)
