"""Length from which an efficient attention pays, at what loss: on shipped activations, or in a model."""

from dataclasses import replace
from functools import partial

from efficient_attn.measure.quantities import MATTERS, QUANTITIES, register, setting
from efficient_attn.studies.advise.plan import BOUND, HEADS, RETRIEVAL, plan
from efficient_attn.studies.study import Study

register(
    kinds={
        "prediction": "speed-up over exact attention, predicted from short calls",
        HEADS: "rank of the key heads of a decoder",
        RETRIEVAL: "retrieval of numbers planted in a text",
        BOUND: "time of a model without attention, which bounds all gains",
    }
)

_number, _text = partial(setting, type="number", threshold=MATTERS), partial(setting, type="text")

STUDY = Study(
    name="advise",
    plan=plan,
    module=__name__,
    kinds=("prediction", HEADS, RETRIEVAL, BOUND),
    quantities=(
        *(QUANTITIES[name] for name in ("output_relative_error", "time_s")),
        _number("predicted_speed", "", "Speed-up, predicted from earlier records."),
        _number("predicted_speed_low", "", "Lower end of the interval of predicted_speed."),
        _number("predicted_speed_high", "", "Upper end of the interval of predicted_speed."),
        _text("chosen_layers", "", "Backend of each replaced layer, JSON."),
        _text("attached_layers", "", "Backends of all attention modules, JSON."),
        _text("head_scores", "", "Layer, key head and score of every key head, JSON."),
        _text("ranked_by", "", "Score by which key heads were ranked."),
        replace(_number("retrieval", "share", "Share of planted numbers that are found."), better="more"),
        _number("retrieval_exact", "share", "retrieval of the model with its own attention."),
        _number("retrieval_error", "share", "Standard error of the difference of both, by numbers."),
        setting("numbers", "", "Number of planted numbers that were asked for."),
        setting("streaming_heads", "", "Number of key heads that stream."),
        setting("key_heads", "", "Number of key heads of the model."),
    ),
)
