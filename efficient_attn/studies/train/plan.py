"""Plan of a training run: one model per backend, trained in rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, get_args

from efficient_attn.errors import OptionError
from efficient_attn.problem import positive_count
from efficient_attn.runner.sizes import with_size
from efficient_attn.runner.variants import YARDSTICK, Variant, select
from efficient_attn.studies import options as shared
from efficient_attn.studies.plan import Plan
from efficient_attn.studies.study import Option
from efficient_attn.studies.workload import Workload, settle

_BACKENDS = replace(
    get_args(shared.Backends)[1],
    help=f"Backends, by name or as path/file.py:function; all causal ones if omitted. {shared.RUNS_CODE}",
)

# Five minutes, less starting and drawing.
_BUDGET_S = 280.0

# Without --steps the budget alone ends a run.
_UNLIMITED = 10**9


def plan(
    backends: Annotated[Sequence[Any] | None, _BACKENDS] = None,
    *,
    text: Annotated[
        str | None,
        Option(help="UTF-8 text; the sources of Python's standard library if omitted.", metavar="FILE"),
    ] = None,
    steps: Annotated[int | None, Option(help="Training steps; a multiple of --every.", least=1)] = None,
    size: Annotated[int, Option(help="Size of every backend (features, window or clusters).", least=1)] = 64,
    options: shared.Settings = None,
    exclude: shared.Exclude = None,
    seq_len: Annotated[int, Option(help="Bytes of a window.", old=("--tokens",), least=1)] = 256,
    batch: shared.Batch = 8,
    model_dim: Annotated[int, Option(help="Dimension of all heads together.", least=1)] = 64,
    num_heads: shared.NumHeads = 4,
    num_layers: Annotated[int, Option(help="Blocks of a model.", flag="--layers", least=1)] = 2,
    learning_rate: shared.LearningRate = 0.01,
    every: Annotated[int, Option(help="Steps from one evaluation and checkpoint to the next.", least=1)] = 20,
    windows: Annotated[int, Option(help="Held-out windows of an evaluation.", least=2)] = 64,
    device: shared.Device = "cpu",
    threads: shared.Threads = None,
    seed: shared.Seed = 0,
    positions: Annotated[str | None, Option(help="Former option.", hidden=True)] = None,
    warmup: Annotated[int | None, Option(help="Former option.", hidden=True)] = None,
) -> Plan:
    """Train a small byte-level language model around each backend.

    The budget holds whole rounds of all models, so that all do the same number of steps. Exact attention is
    always among them. A continued run has the learning curves of an uninterrupted one, to the last bit with
    one thread.

    Example: efficient-attn train --backend window,my_file.py:my_spec --budget 10m
    """
    from efficient_attn.studies.train.config import POSITIONS, WARMUP, TrainConfig
    from efficient_attn.studies.train.rounds import Rounds, outcome
    from efficient_attn.studies.train.text import read_text

    if positions not in (None, POSITIONS) or warmup not in (None, WARMUP):
        raise OptionError(
            f"train takes neither positions nor warmup: positions are {POSITIONS} and the rate rises for "
            f"{WARMUP} steps. Leave them out; a run that was begun with others cannot be continued."
        )
    machine = settle(Workload(device=device, threads=threads, dtype="float32"))
    config = TrainConfig(
        tokens=seq_len,
        batch=batch,
        model_dim=model_dim,
        num_heads=num_heads,
        num_layers=num_layers,
        learning_rate=learning_rate,
        every=every,
        windows=windows,
        seed=seed,
        device=machine.device,
        threads=machine.threads or 1,
    )
    if steps is not None:
        positive_count("steps", steps)
    if steps is not None and steps % every:
        raise OptionError(f"steps={steps} does not end with an evaluation; name a multiple of every={every}.")
    chosen = variants(backends, size=size, options=options, exclude=exclude)
    models = Rounds(chosen, read_text(text, tokens=seq_len), config)
    return Plan(
        points=models.points(_UNLIMITED if steps is None else steps // every),
        device=config.device,
        resources=models.training(),
        lockstep=True,
        outcome=outcome,
        attach=models.attach,
        budget_s=_BUDGET_S,
    )


def variants(
    backends: Sequence[Any] | None,
    *,
    size: int,
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    exclude: Sequence[str] | None = None,
) -> tuple[Variant, ...]:
    """Exact attention, then the other backends, each of the same size unless another is set."""
    from efficient_attn.backends import list_backends, resolve

    positive_count("size", size)
    named = list(list_backends(causal=True) if backends is None else backends)
    chosen = select(named if YARDSTICK in named else [YARDSTICK, *named], options, exclude=exclude)

    def sized(variant: Variant) -> Variant:
        name = variant.target if isinstance(variant.target, str) else variant.backend
        option = resolve(variant.target).size_option
        if option is None or option in (options or {}).get(name, {}):
            return variant
        return with_size(variant, option, size)

    return tuple(sorted(map(sized, chosen), key=lambda variant: variant.backend != YARDSTICK))
