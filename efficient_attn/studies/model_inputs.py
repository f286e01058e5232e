"""q, k and v of a model in the place of named inputs, captured in memory before a measurement."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from efficient_attn.errors import OptionError
from efficient_attn.measure.texts import read_text
from efficient_attn.studies.options import MODEL_HELP, parse_text
from efficient_attn.studies.study import Option


def _read(text: str, *, name: str) -> str:
    return read_text(Path(text), name=name)


Model = Annotated[Any, Option(help=f"{MODEL_HELP} Replaces --inputs.", metavar="MODEL", parse=parse_text)]
Text = Annotated[
    str | None, Option(help="UTF-8 text for the folder of --model.", metavar="FILE", parse=_read)
]


_Made = TypeVar("_Made")


def those_that_fit(
    given: Sequence[Any], make: Callable[[Any], _Made], *, default: Sequence[str]
) -> tuple[list[_Made], list[str]]:
    """What is made of each of the inputs, and remarks on inputs by default that do not fit the request.

    Raises:
        OptionError: If the user named inputs that do not fit, or none fits.
    """
    made, left_out = [], []
    for source in given:
        try:
            made.append(make(source))
        except OptionError as reason:
            if list(given) != list(default):
                raise
            left_out.append(str(reason))
    if not made:
        raise OptionError(" ".join(left_out) or "inputs must not be empty.")
    return made, [f"Left out: {reason}" for reason in left_out]


def sources(
    inputs: str | Path | Sequence[str | Path],
    model: Any,
    text: str | None,
    *,
    default: str | Sequence[str],
    max_tokens: int | None = None,
) -> tuple[list[Any], list[str]]:
    """The inputs or the activations of the model, and remarks on its call sites.

    Args:
        default: Value of `inputs` unless the user names others.

    Raises:
        OptionError: If inputs accompany a model, or a text no model.
    """
    named, usual = ([one] if isinstance(one, (str, Path)) else list(one) for one in (inputs, default))
    if model is None:
        if text is not None:
            raise OptionError("text belongs to a model: name its folder by model (--model FOLDER).")
        return named, []
    if named != usual:
        raise OptionError(f"inputs ({named[0]}) and model ({model}) exclude each other; name one of them.")

    from efficient_attn.integrations.called import is_called
    from efficient_attn.integrations.capture import captured_model, notes_of

    captured = captured_model(model, text=text, max_tokens=None if is_called(model) else max_tokens)
    return [captured], notes_of(captured)
