"""Plan of a training run: one model per backend, trained in rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, get_args

from efficient_attn.errors import OptionError
from efficient_attn.problem import positive_count
from efficient_attn.runner.variants import YARDSTICK, Variant, select
from efficient_attn.studies import options as shared
from efficient_attn.studies.plan import Plan
from efficient_attn.studies.study import Option
from efficient_attn.studies.workload import Workload, settle

# Backends of the task copy: all would take longer than the budget.
_COPIERS = ("exact", "window", "linformer", "performer-positive")

_BACKENDS = replace(
    get_args(shared.Backends)[1],
    help="Backends, by name or as path/file.py:function; if omitted, for text all causal ones, for copy "
    f"{', '.join(_COPIERS)}. {shared.RUNS_CODE}",
)

# Defaults that depend on the task; without steps the budget alone ends a run.
_DEFAULTS: dict[str, dict[str, int]] = {
    "text": {"size": 64, "seq_len": 256, "batch": 8, "num_layers": 2, "every": 20, "windows": 64},
    "copy": {
        "size": 8,
        "seq_len": 16,
        "batch": 64,
        "num_layers": 1,
        "every": 50,
        "windows": 256,
        "steps": 400,
    },
}


def _by_task(name: str, meaning: str, **declared: Any) -> Option:
    """An option of which every task has its own default."""
    values = ", ".join(f"{one[name]} ({task})" for task, one in _DEFAULTS.items() if name in one)
    return Option(help=f"{meaning}; by default {values}.", **declared)


_SIZE = _by_task("size", "Size of every backend (features, window or clusters)", least=1)
_SEQ_LEN = _by_task(
    "seq_len", "Bytes of a window, or tokens of a sequence at most", old=("--tokens",), least=1
)
_LAYERS = _by_task("num_layers", "Blocks of a model, or of each of its halves", flag="--layers", least=1)
_EVERY = _by_task("every", "Steps from one evaluation and checkpoint to the next", least=1)
_WINDOWS = _by_task("windows", "Held-out windows or sequences of an evaluation", least=2)
_RATE = replace(
    get_args(shared.LearningRate)[1],
    help="Peak learning rate; by default 0.01 (text) or the one with a warm-up of 156 steps (copy).",
)
# Tensors of the task copy are small: two threads wait for each other, on a busy machine for most of the time.
_THREADS = replace(
    get_args(shared.Threads)[1], help="CPU threads; if omitted torch's default (text) or 1 (copy)."
)

# Five minutes, less starting and drawing.
_BUDGET_S = 280.0


def plan(
    backends: Annotated[Sequence[Any] | None, _BACKENDS] = None,
    *,
    task: Annotated[
        str,
        Option(
            help="Language modelling of text, or copying of random sequences.",
            metavar="text|copy",
        ),
    ] = "text",
    text: Annotated[
        str | None,
        Option(help="UTF-8 text; the sources of Python's standard library if omitted.", metavar="FILE"),
    ] = None,
    steps: Annotated[int | None, _by_task("steps", "Training steps; a multiple of --every", least=1)] = None,
    size: Annotated[int | None, _SIZE] = None,
    options: shared.Settings = None,
    exclude: shared.Exclude = None,
    seq_len: Annotated[int | None, _SEQ_LEN] = None,
    batch: Annotated[int | None, _by_task("batch", "Batch size", least=1)] = None,
    model_dim: Annotated[int, Option(help="Dimension of all heads together.", least=1)] = 64,
    num_heads: shared.NumHeads = 4,
    num_layers: Annotated[int | None, _LAYERS] = None,
    learning_rate: Annotated[float | None, _RATE] = None,
    every: Annotated[int | None, _EVERY] = None,
    windows: Annotated[int | None, _WINDOWS] = None,
    device: shared.Device = "cpu",
    threads: Annotated[int | None, _THREADS] = None,
    seed: shared.Seed = 0,
    positions: Annotated[str | None, Option(help="Former option.", hidden=True)] = None,
    warmup: Annotated[int | None, Option(help="Former option.", hidden=True)] = None,
) -> Plan:
    """Train a small model around each backend: a byte-level language model, or one that copies sequences.

    The budget holds whole rounds of all models, so that all do the same number of steps. Exact attention is
    always among them. A continued run has the learning curves of an uninterrupted one, to the last bit with
    one thread.

    Example: efficient-attn train --backend window,my_file.py:my_spec --budget 10m
    """
    from efficient_attn.modules.options import one_of
    from efficient_attn.studies.train.config import TrainConfig
    from efficient_attn.studies.train.copying import CopyTask, default_rate, doubtful_warmup, stays_exact
    from efficient_attn.studies.train.language import POSITIONS, RATE, WARMUP, LanguageTask
    from efficient_attn.studies.train.rounds import Rounds, outcome
    from efficient_attn.studies.train.text import read_text

    one_of("task", task, _DEFAULTS)
    if task == "copy" and text is not None:
        raise OptionError(f"text={text}: the task copy draws its sequences; leave text out, or task.")
    if task == "copy" and (positions, warmup) != (None, None):
        raise OptionError(
            "The task copy takes neither positions nor warmup: positions are sinusoidal, and the warm-up "
            "follows from learning_rate. Leave them out."
        )
    if positions not in (None, POSITIONS) or warmup not in (None, WARMUP):
        raise OptionError(
            f"train takes neither positions nor warmup: positions are {POSITIONS} and the rate rises for "
            f"{WARMUP} steps. Leave them out; a run that was begun with others cannot be continued."
        )
    positive_count("model_dim", model_dim)
    if task == "copy" and threads is None:
        threads = 1
    machine = settle(Workload(device=device, threads=threads, dtype="float32"))
    named = {"steps": steps, "size": size, "seq_len": seq_len, "batch": batch, "every": every}
    named |= {"windows": windows, "num_layers": num_layers}
    own = {**_DEFAULTS[task], **{name: value for name, value in named.items() if value is not None}}
    if learning_rate is None:
        learning_rate = default_rate(model_dim) if task == "copy" else RATE
    config = TrainConfig(
        task=task,
        tokens=own["seq_len"],
        batch=own["batch"],
        model_dim=model_dim,
        num_heads=num_heads,
        num_layers=own["num_layers"],
        learning_rate=learning_rate,
        every=own["every"],
        windows=own["windows"],
        seed=seed,
        device=machine.device,
        threads=machine.threads or 1,
    )
    last = own.get("steps")
    if last is not None:
        positive_count("steps", last)
        if steps is None:
            last = -(-last // config.every) * config.every
        elif last % config.every:
            raise OptionError(
                f"steps={last} does not end with an evaluation; name a multiple of every={config.every}."
            )
    backends = _COPIERS if backends is None and task == "copy" else backends
    chosen = variants(backends, config, size=own["size"], options=options, exclude=exclude)
    notes: list[str] = []
    data: CopyTask | LanguageTask
    if task == "copy":
        data = CopyTask(config)
        notes = [*stays_exact(chosen), *doubtful_warmup(data, config, steps=last or 0)]
    else:
        data = LanguageTask(read_text(text, tokens=config.tokens), config)
    models = Rounds(chosen, data, config, notes)
    return Plan(
        points=models.points(None if last is None else last // config.every),
        notes=models.notes,
        device=config.device,
        resources=models.training(),
        lockstep=True,
        outcome=outcome,
        attach=models.attach,
        follow=models.follow,
        budget_s=_BUDGET_S,
    )


def variants(
    backends: Sequence[Any] | None,
    config: Any,
    *,
    size: int,
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    exclude: Sequence[str] | None = None,
) -> tuple[Variant, ...]:
    """Exact attention, then the other backends, each of the same size unless another is set."""
    from efficient_attn.backends import list_backends, resolve
    from efficient_attn.measure.inputs import gaussian
    from efficient_attn.runner.accuracy import at_size
    from efficient_attn.runner.inputs import Subject

    positive_count("size", size)
    text, head_dim = config.task == "text", config.model_dim // config.num_heads
    named = list(list_backends(causal=True if text else None) if backends is None else backends)
    chosen = select(named if YARDSTICK in named else [YARDSTICK, *named], options, exclude=exclude)

    inputs = gaussian(norm=1.0, tokens=config.tokens, head_dim=head_dim, num_heads=config.num_heads)
    tried = Subject(name="", activations=inputs, scale=head_dim**-0.5, causal=text)

    def sized(variant: Variant) -> Variant:
        name = variant.target if isinstance(variant.target, str) else variant.backend
        option = resolve(variant.target).size_option
        if option is None or option in (options or {}).get(name, {}):
            return variant
        return at_size(variant, tried, option, size)

    return tuple(sorted(map(sized, chosen), key=lambda variant: variant.backend != YARDSTICK))
