"""Learned conversion: minutes of layer-wise distillation of backends to the attention of a model."""

from efficient_attn.runner.quantity import MATTERS, QUANTITIES, error, setting
from efficient_attn.studies.adapt.plan import plan
from efficient_attn.studies.study import Study
from efficient_attn.studies.swap import STUDY as SWAP

STUDY = Study(
    name="adapt",
    plan=plan,
    folder=__name__,
    kinds=("adapt",),
    # Whole models are records of the study swap; all are means over held-out windows.
    quantities=(
        *(one for one in SWAP.quantities if one.name not in ("time_s", "peak_bytes")),
        setting(
            "adapt_s",
            "s",
            "Time of the adaptation of all layers, the model's own forward passes included.",
            type="number",
            threshold=MATTERS,
        ),
        setting("adapted_parameters", "", "Number of adapted parameters of all layers together."),
        setting("adapt_steps", "", "Number of training steps; 0: calibration alone."),
        setting(
            "adapt_learning_rate",
            "",
            "Learning rate of an adapted layer, or of LoRA; none: the state before was the best.",
            type="number",
        ),
        error("adapt_loss", "squared", "Squared relative error on validation windows, mean over layers."),
        QUANTITIES["flops"],
    ),
)
