"""Options that several studies share, each declared once."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

from efficient_attn.limits import WHOLE_NUMBER
from efficient_attn.measure.units import parse_names, parse_seconds, parse_sizes
from efficient_attn.measure.variants import parse_settings
from efficient_attn.studies.study import Option

# Everybody should know this before naming a file of somebody else.
RUNS_CODE = "The file is executed."
MODEL_HELP = (
    f"Folder of a transformers model, or FILE.py:function that makes a model with its inputs. {RUNS_CODE}"
)


def parse_numbers(
    meaning: str, allowed: Callable[[float], bool], kind: Callable[[str], Any] = float
) -> Callable[..., tuple[Any, ...]]:
    """A parser of numbers joined by commas, all of which are allowed."""

    def parse(text: str, *, name: str) -> tuple[Any, ...]:
        from efficient_attn.errors import OptionError

        try:
            numbers = tuple(map(kind, text.split(",")))
        except ValueError:
            numbers = ()
        if not numbers or not all(map(allowed, numbers)):
            raise OptionError(f"{name} is made of {meaning}, not {text!r}.")
        return tuple(dict.fromkeys(numbers))

    return parse


parse_layers = parse_numbers("whole numbers, such as 0,1,5", lambda layer: layer >= 0, int)


InputNames = str | Path | Sequence[str | Path]
INPUTS_HELP = "encoder (512 tokens), decoder (4096, causal), gaussian, or FILE.safetensors."

Backends = Annotated[
    Sequence[Any] | None,
    Option(
        help=f"Names or FILE.py:function; all near softmax if omitted. {RUNS_CODE}",
        flag="--backend",
        metavar="NAME[,NAME…]",
        parse=parse_names,
        several=True,
    ),
]
Settings = Annotated[
    Mapping[str, Mapping[str, Sequence[Any]]] | None,
    Option(
        help="Option of a backend; several values make several variants.",
        flag="--set",
        metavar="NAME.OPTION=V[,V…]",
        parse=lambda texts, name: parse_settings(texts or []),
        several=True,
    ),
]
Sizes = Annotated[
    str | int | Sequence[int],
    Option(
        help="Sizes (features, rank or window): 32,64 or 32:256:x2.",
        flag="--size",
        metavar="SIZES",
        parse=parse_sizes,
    ),
]
SeqLens = Annotated[
    str | int | Sequence[int],
    Option(
        help="Sequence lengths in tokens: 512,1k or 256:4096:x2.",
        flag="--seq-len",
        metavar="LENGTHS",
        parse=parse_sizes,
    ),
]
Causal = Annotated[bool, Option(help="Each token attends to itself and earlier tokens.")]
Backward = Annotated[bool, Option(help="Forward and backward pass together.")]
NumHeads = Annotated[int, Option(help="Number of heads.", least=1, rare=True)]
HeadDim = Annotated[int, Option(help="Head dimension.", least=1, rare=True)]
Layers = Annotated[
    Sequence[int] | None,
    Option(
        help="Indices of layers, from 0; all layers if omitted.",
        metavar="N[,N…]",
        parse=parse_layers,
        rare=True,
    ),
]
Norms = Annotated[
    Sequence[float],
    Option(
        help="Standard deviations of Gaussian q, k; |q|/d^¼ of entries.",
        flag="--norm",
        metavar="NORM[,NORM…]",
        parse=parse_numbers("finite numbers above 0, such as 0.5,1", lambda norm: 0 < norm < math.inf),
    ),
]
Angles = Annotated[
    Sequence[float],
    Option(
        help="Angles between query and key in degrees, 0 to 180.",
        flag="--angle",
        metavar="DEG[,DEG…]",
        rare=True,
        parse=parse_numbers("degrees from 0 to 180, such as 60,90", lambda angle: 0 <= angle <= 180),
    ),
]
Device = Annotated[str, Option(help="auto, cpu, cuda or cuda:1.")]
Dtype = Annotated[
    str, Option(help="auto (float32 on the CPU, half precision on CUDA) or a dtype.", rare=True)
]
Threads = Annotated[int | None, Option(help="CPU threads; torch's default if omitted.", least=1, rare=True)]
Seed = Annotated[int, Option(help="Random seed.", least=0, most=WHOLE_NUMBER, rare=True)]
Draws = Annotated[int, Option(help="Number of random-feature draws.", least=1)]
Seeds = Annotated[int, Option(help="Number of seeds; each is a training of its own.")]
Rounds = Annotated[
    int, Option(help="Timing rounds per point; more rounds narrow the interval.", least=1, rare=True)
]


Timeout = Annotated[
    float,
    Option(
        help="Time limit of a point, unless measured in this process: 60s, 2m.",
        flag="--timeout",
        metavar="TIME",
        parse=parse_seconds,
        rare=True,
    ),
]


def usually(declared: Any, value: Any) -> Option:
    """Declaration of a shared option whose default is None, so that a typed value can be refused."""
    option: Option = get_args(declared)[1]
    return replace(option, help=f"{option.help.removesuffix('.')}; {value} if omitted.")


def worded(declared: Any, text: str) -> Option:
    """Declaration of a shared option with another help text."""
    option: Option = get_args(declared)[1]
    return replace(option, help=text)
