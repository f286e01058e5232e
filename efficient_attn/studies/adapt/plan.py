"""Plan of a learned conversion: fidelity before, adaptation, fidelity after."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

from efficient_attn.errors import DataError, OptionError, UnsupportedError
from efficient_attn.measure.texts import named_texts
from efficient_attn.modules.options import positive_number
from efficient_attn.problem import positive_count
from efficient_attn.report.escape import short
from efficient_attn.runner.sizes import MODEL
from efficient_attn.runner.variants import Variant, select
from efficient_attn.studies import options as shared
from efficient_attn.studies.adapt.labels import ADAPTED, LORA
from efficient_attn.studies.plan import Plan, Point
from efficient_attn.studies.study import Option
from efficient_attn.studies.swap.plan import TextFiles
from efficient_attn.studies.workload import Workload, settle

# Learned backends, and the untrained one to compare them with.
_USUAL = ("linformer", "linear-hedgehog", "window-clusters")

# Key of a run's environment that holds the settings of the training.
ADAPTATION = "adaptation"

_Rate = Annotated[
    float | None,
    replace(
        get_args(shared.LearningRate)[1],
        help="Peak learning rate of all layers; if omitted, each layer gets the one of six rates from "
        "0.0003 to 0.1 that is best on validation windows after a tenth of the steps.",
    ),
]

_BACKENDS = replace(
    get_args(shared.Backends)[1],
    help="Backends, by name or as path/file.py:function; those without parameters are measured as they are. "
    f"{', '.join(_USUAL)} if omitted. {shared.RUNS_CODE}",
)

_LORA = Option(
    help="Rank of low-rank additions (LoRA) to the projections of q, k, v and outputs, trained end to end "
    "after the backends for as many steps; 0: none.",
    metavar="RANK",
    least=0,
)


def plan(
    model: Annotated[
        Any,
        Option(
            help="Folder of a Hugging Face model.", metavar="MODEL", parse=shared.parse_text, argument=True
        ),
    ],
    backends: Annotated[Sequence[Any] | None, _BACKENDS] = None,
    *,
    texts: TextFiles = None,
    tokenizer: Any = None,
    seq_len: shared.SeqLen = None,
    steps: Annotated[int, Option(help="Training steps of all layers.", least=1)] = 200,
    learning_rate: _Rate = None,
    batch: Annotated[int, Option(help="Windows of a training step.", least=1)] = 2,
    held_out: Annotated[int, Option(help="Windows at the end of the texts to measure on.", least=1)] = 2,
    lora: Annotated[int, _LORA] = 0,
    options: shared.Settings = None,
    exclude: shared.Exclude = None,
    name: Annotated[str | None, Option(help="Name of the model in records; the folder's if omitted.")] = None,
    dtype: Annotated[str, Option(help="Dtype of the model.")] = "float32",
    device: shared.Device = "cpu",
    threads: shared.Threads = None,
    seed: shared.Seed = 0,
) -> Plan:
    """Train the own parameters of backends to imitate the attention of a model, layer by layer.

    The weights of the model stay as they are; with `lora` its projections get low-rank additions, which are
    trained and saved separately. Backends that need a calibration are calibrated on training
    windows instead, other backends are measured as they are. Held-out windows are the last ones of the texts;
    of the others every eighth validates: it chooses learning rates and states, which are never worse there
    than before. The run's folder holds the adapted backends of each variant, which
    `integrations.transformers.load(FOLDER/adapted/VARIANT, into=model)` attaches to the model;
    FOLDER/lora/VARIANT holds them with the additions, which `load` adds to the weights.

    Example: efficient-attn adapt MODEL --backend linear-hedgehog --text FILE --steps 300
    """
    positive_count("steps", steps)
    positive_count("batch", batch)
    positive_count("held_out", held_out)
    if lora:
        positive_count("lora", lora)
    if learning_rate is not None:
        positive_number("learning_rate", learning_rate)
    workload = settle(Workload(dtype=dtype, device=device, threads=threads, seed=seed))

    from efficient_attn.integrations.called import is_called
    from efficient_attn.integrations.transformers.low_rank import projections
    from efficient_attn.studies.adapt.training import Adaptations, Training
    from efficient_attn.studies.adapt.windows import held_out_subject
    from efficient_attn.studies.swap.model import load

    if is_called(model):
        raise OptionError(
            "adapt reads texts: model is the folder of a Hugging Face model, or one with tokenizer."
        )
    opened, named = load(model, tokenizer, name, workload), named_texts(texts)
    subject, windows = held_out_subject(opened, named, workload, seq_len=seq_len, held_out=held_out)
    usual = [one for one in _USUAL if one != "linformer" or not subject.sites.causal]
    chosen = select(usual if backends is None else backends, options, exclude=exclude)
    variants = [subject.fitted(one) for one in chosen]
    if lora:
        projections(subject.model, subject.sites)
    training = Training(steps=steps, learning_rate=learning_rate, batch=batch, seed=seed, lora=lora)
    adaptations = Adaptations(subject, windows, training)
    changing = [one for one in variants if adaptations.changes(one)]
    if not changing and not lora:
        labels = ", ".join(one.label for one in variants)
        raise UnsupportedError(
            f"Nothing to adapt in {labels}: none has parameters or a calibration. linformer, linear-hedgehog "
            "and performer-full have; lora=RANK trains additions to the projections around any backend."
        )
    settings = {**asdict(training), "held_out": held_out, "seq_len": subject.shared["tokens"]}
    return Plan(
        points=[
            *(
                point
                for one in variants
                if not adaptations.calibrates(one)
                for point in _points(adaptations, one, adapted=False)
            ),
            *(point for one in changing for point in _points(adaptations, one, adapted=True)),
            *(point for one in variants if lora for point in _with_lora(adaptations, one)),
        ],
        device=subject.shared["device"],
        notes=[
            f"{len(windows)} windows for training and validation, the last {held_out} held out.",
            *subject.notes,
        ],
        about={MODEL: subject.about, ADAPTATION: settings},
        attach=partial(_attach, adaptations),
        undivided="adapt keeps the states of all its training in one folder; leave it out",
    )


def _points(adaptations: Any, variant: Variant, *, adapted: bool) -> list[Point]:
    """The adaptation if it is wanted, then the whole model and every layer alone."""
    from efficient_attn.studies.adapt import measure

    subject = adaptations.subject
    shown = replace(variant, label=f"{variant.label}{ADAPTED}") if adapted else variant
    training, whole = subject.case("adapt", shown), subject.case("swap", shown)
    points = []
    if adapted:
        points = [
            Point(
                case=training,
                measure=partial(measure.training, training, adaptations, variant, lora=False),
                label=f"{variant.label}, adaptation",
                needs=None if adaptations.calibrates(variant) else subject.case("swap", variant),
            )
        ]
    points.append(
        Point(
            case=whole,
            measure=partial(measure.whole, whole, adaptations, variant, adapted=adapted),
            label=f"{shown.label}, all layers",
            needs=training if adapted else None,
        )
    )
    for layer in subject.layers:
        case = subject.case("adapt", shown, layer)
        points.append(
            Point(
                case=case,
                measure=partial(measure.layer, case, adaptations, variant, adapted=adapted),
                label=f"{shown.label}, layer {layer}",
                needs=whole,
            )
        )
    return points


def _with_lora(adaptations: Any, variant: Variant) -> list[Point]:
    """The training of the additions, then the whole model."""
    from efficient_attn.studies.adapt import measure

    subject = adaptations.subject
    shown = replace(variant, label=f"{variant.label}{LORA}")
    before = replace(variant, label=f"{variant.label}{ADAPTED}") if adaptations.changes(variant) else variant
    training, whole = subject.case("adapt", shown), subject.case("swap", shown)
    return [
        Point(
            case=training,
            measure=partial(measure.training, training, adaptations, variant, lora=True),
            label=f"{shown.label}, training",
            needs=subject.case("swap", before),
        ),
        Point(
            case=whole,
            measure=partial(measure.whole, whole, adaptations, variant, adapted=True, lora=True),
            label=f"{shown.label}, all layers",
            needs=training,
        ),
    ]


def _attach(adaptations: Any, plan: Plan, folder: Path, *, resume: bool) -> Plan:
    """The plan with its checkpoints in the folder, if the folder holds the same adaptation."""
    from efficient_attn.studies.run_folder import ENVIRONMENT, read_json

    file = folder / ENVIRONMENT
    known = read_json(file) if resume and file.exists() else plan.about
    if known.get(ADAPTATION) != plan.about[ADAPTATION]:
        was, now = (short(str(about.get(ADAPTATION))) for about in (known, plan.about))
        raise DataError(f"out: {folder} was begun with {was}, not {now}; name a new folder.")
    adaptations.folder = folder
    return plan
