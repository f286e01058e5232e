"""`efficient-attn mse`: how wrong each backend is, size by size."""

import math
import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from efficient_attn.errors import OptionError
from efficient_attn.limits import WHOLE_NUMBER

from . import outcome, talk
from .options import (
    BackendOption,
    ExtraArguments,
    HeadDimOption,
    JsonToOption,
    OutOption,
    SetOption,
    as_json,
    names,
    refuse_extra,
)
from .plan import PlanOption, as_plan

NumFeaturesOption = Annotated[
    str,
    typer.Option(
        "--num-features",
        metavar="SIZES",
        help="The size of every backend (features, rank or window): 16,64 or 16:1024:x2 or 1k.",
    ),
]
InputsOption = Annotated[
    str,
    typer.Option(
        "--inputs",
        metavar="NAME[,NAME…]",
        help="gaussian, encoder (shipped), stitched (four documents concatenated) or FILE.safetensors.",
    ),
]
ErrorOfOption = Annotated[
    str | None,
    typer.Option("--of", help="output (the default), weights, or kernel: one entry of it, beside theory."),
]
MetricOption = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="relative, mse, unsafe (rows without a positive sum), or frobenius, kl of the weights.",
    ),
]
ByOption = Annotated[
    str | None, typer.Option("--by", metavar="head", help="Tell the error of each head too.")
]
MatchOption = Annotated[
    str,
    typer.Option(
        "--match",
        metavar="features|directions|flops|time|memory",
        help="What backends have equal amounts of; a budget is what performer-positive takes.",
    ),
]
DecomposeOption = Annotated[
    bool, typer.Option("--decompose/--no-decompose", help="Tell bias, spread over draws and rounding apart.")
]
DataSeedsOption = Annotated[
    int, typer.Option("--data-seeds", min=1, help="Independent draws of Gaussian inputs.")
]
NormOption = Annotated[
    str,
    typer.Option(
        "--norm",
        metavar="S[,S…]",
        help="Gaussian inputs: q, k ~ N(0, S² I) before any scale; of a kernel entry |q|/d^¼.",
    ),
]
AngleOption = Annotated[
    str, typer.Option("--angle", metavar="DEG[,DEG…]", help="--of kernel: between query and key, 0 to 180.")
]
DrawsOption = Annotated[
    int | None,
    typer.Option("--draws", min=1, help="Independent draws of random features; 6, or 64 of a kernel entry."),
]
TokensOption = Annotated[int, typer.Option("--seq-len", min=1, help="Tokens of Gaussian inputs.")]
LayerOption = Annotated[
    str | None,
    typer.Option("--layer", metavar="N[,N…]", help="Layers of the encoder or file; all if left out."),
]
DrawSeedOption = Annotated[
    int, typer.Option("--seed", min=0, max=WHOLE_NUMBER, help="Of Gaussian inputs and of the first draw.")
]


def mse_command(
    context: typer.Context,
    plan: PlanOption = None,
    extra: ExtraArguments = None,
    num_features: NumFeaturesOption = "16:1024:x2",
    backend: BackendOption = None,
    set_: SetOption = None,
    inputs: InputsOption = "gaussian,encoder",
    of: ErrorOfOption = None,
    metric: MetricOption = None,
    by: ByOption = None,
    match: MatchOption = "features",
    decompose: DecomposeOption = False,
    norm: NormOption = "0.5,1",
    angle: AngleOption = "60,90,120",
    draws: DrawsOption = None,
    data_seeds: DataSeedsOption = 1,
    seq_len: TokensOption = 4096,
    head_dim: HeadDimOption = 16,
    layer: LayerOption = None,
    seed: DrawSeedOption = 0,
    out: OutOption = None,
    json_to: JsonToOption = None,
) -> None:
    """Measure how far backends are from exact softmax attention, beside the mean of the values.

    Example: efficient-attn mse --inputs encoder --backend window,my_file.py:my_attention
    """
    from efficient_attn.experiments import mse
    from efficient_attn.experiments.error_points import plan_mse
    from efficient_attn.experiments.files import open_folder, run_folder
    from efficient_attn.measure.environment import command_line
    from efficient_attn.sweep.amounts import parse_sizes
    from efficient_attn.sweep.questions import ask
    from efficient_attn.sweep.variants import parse_settings

    refuse_extra(extra, "--num-features 16,64")
    # What is wrong in the request itself is said before torch is loaded.
    sizes = parse_sizes(num_features, name="--num-features")
    norms = _norms(norm)
    layers = _layers(layer)
    settings = parse_settings(set_ or [])
    question = ask(of=of, metric=metric, draws=draws, by=by, match=match, decompose=decompose)
    to_stdout = as_json(json_to)
    named = names(backend)
    points = plan_mse(
        named,
        question,
        sizes=sizes,
        inputs=names([inputs]) or (),
        norms=norms,
        angles=_angles(angle),
        tokens=seq_len,
        head_dim=head_dim,
        layers=layers,
        data_seeds=data_seeds,
        options=settings,
        seed=seed,
    )
    folder = open_folder(out or run_folder("mse"), name="--out", fresh=True)
    # What a backend prints is talk: stdout holds results and nothing else.
    with talk.progress(len(points)) as show, redirect_stdout(sys.stderr):
        results = mse.run_mse(
            points,
            question,
            out=folder,
            command=command_line(),
            plan=as_plan(context, {}),
            progress=show,
        )
    outcome.finish(results, named, folder=folder, as_json=to_stdout)


def _norms(text: str) -> tuple[float, ...]:
    try:
        norms = tuple(float(part) for part in text.split(","))
    except ValueError:
        norms = ()
    if not norms or not all(0 < norm < math.inf for norm in norms):
        raise OptionError(f"--norm is made of finite numbers above 0, such as 0.5,1, not {text!r}.")
    return tuple(dict.fromkeys(norms))


def _angles(text: str) -> tuple[float, ...]:
    try:
        angles = tuple(float(part) for part in text.split(","))
    except ValueError:
        angles = ()
    if not angles or not all(0 <= angle <= 180 for angle in angles):
        raise OptionError(f"--angle is made of degrees from 0 to 180, such as 60,90, not {text!r}.")
    return tuple(dict.fromkeys(angles))


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise OptionError(f"--layer is made of whole numbers, such as 0,1,5, not {text!r}.")
    return tuple(map(int, parts))
