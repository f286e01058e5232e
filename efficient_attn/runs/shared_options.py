"""Options that several studies share, each declared once: functions that make a field with a default."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from efficient_attn.errors import OptionError
from efficient_attn.limits import WHOLE_NUMBER
from efficient_attn.measure.units import parse_names, parse_sizes
from efficient_attn.measure.variants import parse_settings
from efficient_attn.options import option

# Shown wherever a file may be named: its code runs.
RUNS_CODE = "The file is executed."
MODEL_HELP = f"Folder of a transformers model, or FILE.py:function that returns (model, inputs). {RUNS_CODE}"

Backends = Sequence[Any] | None
Settings = Mapping[str, Mapping[str, Sequence[Any]]] | None
Sizes = str | int | Sequence[int]


def parse_numbers(
    meaning: str, allowed: Callable[[float], bool], kind: Callable[[str], Any] = float
) -> Callable[..., tuple[Any, ...]]:
    """Parser of numbers joined by commas, all of which are allowed."""

    def parse(text: str, *, name: str) -> tuple[Any, ...]:
        try:
            numbers = tuple(map(kind, text.split(",")))
        except ValueError:
            numbers = ()
        if not numbers or not all(map(allowed, numbers)):
            raise OptionError(f"{name} is made of {meaning}, not {text!r}.")
        return tuple(dict.fromkeys(numbers))

    return parse


parse_layers = parse_numbers("whole numbers, such as 0,1,5", lambda layer: layer >= 0, int)


def _or(help: str, default: str | None) -> str:
    """Help text with the default of an option whose default None tells that nothing was typed."""
    return help if default is None else f"{help.removesuffix('.')}; {default} if omitted."


def backends(*, free: bool = True, usual: str = "softmax approximations") -> Any:
    return option(
        None,
        f"Backend names, all, or FILE.py:function; {usual} if omitted. {RUNS_CODE}",
        flag="--backend",
        metavar="NAME[,NAME…]",
        parse=parse_names,
        several=True,
        free=free,
    )


settings = partial(
    option,
    None,
    "Backend option; several values give several variants.",
    flag="--set",
    metavar="NAME.OPTION=V[,V…]",
    parse=lambda texts, name: parse_settings(texts or []),
    several=True,
    free=True,
)


def sizes(default: Sequence[int] | None, shown: str | None = None) -> Any:
    return option(
        default,
        _or("Number of features, rank or window: 32,64 or 32:256:x2.", shown),
        flag="--size",
        alias="--num-features",
        metavar="SIZES",
        parse=parse_sizes,
        free=True,
    )


def seq_lens(
    default: Sequence[int] | None, help: str = "Sequence lengths in tokens: 512,1k or 256:4096:x2."
) -> Any:
    return option(default, help, flag="--seq-len", metavar="LENGTHS", parse=parse_sizes, free=True)


def head_dim(default: int | None, shown: str | None = None) -> Any:
    return option(default, _or("Head dimension.", shown), least=1, rare=True)


def layers(help: str = "Layer indices, from 0; all layers if omitted.") -> Any:
    return option(None, help, metavar="N[,N…]", parse=parse_layers, rare=True)


def device(default: str | None, shown: str | None = None) -> Any:
    return option(default, _or("auto, cpu, cuda or cuda:1.", shown))


causal = partial(option, False, "Use a causal mask.")
threads = partial(option, None, "CPU threads; number of idle cores if omitted.", least=1, rare=True)
seed = partial(option, 0, "Random seed.", least=0, most=WHOLE_NUMBER, rare=True)
