"""Small language models that differ by their attention alone, trained by turns on the same bytes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from efficient_attn.analysis.curves import YARDSTICK
from efficient_attn.analysis.doubts import DURING
from efficient_attn.contained import contained, described
from efficient_attn.errors import AttentionError, OptionError
from efficient_attn.experiments.checkpoints import model_path, read_model
from efficient_attn.experiments.course import Course, course
from efficient_attn.experiments.files import open_folder
from efficient_attn.experiments.folder import only_writer
from efficient_attn.experiments.learner import Learner
from efficient_attn.experiments.results import Results
from efficient_attn.experiments.texts import Text, read_text
from efficient_attn.experiments.turns import Book, Limit, by_turns
from efficient_attn.measure.conditions import between, moment
from efficient_attn.measure.environment import environment
from efficient_attn.problem import positive_count
from efficient_attn.report.harmless import plain
from efficient_attn.sweep.run import Step
from efficient_attn.sweep.sizes import with_size
from efficient_attn.sweep.variants import Variant, select

# Five minutes, less what starting and drawing take.
DEFAULT_BUDGET_S = 280.0
# What models are asked to go on from, and how much they prefer likely bytes.
_PROMPT, _TEMPERATURE = b"\n    def ", 0.7

# Of features, window or clusters. The default window would read all of a context of 256 bytes.
DEFAULT_SIZE = 64


def train(
    backends: Sequence[Any] | None = None,
    *,
    text: str | Path | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    steps: int | None = None,
    size: int = DEFAULT_SIZE,
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    tokens: int = Course.tokens,
    batch: int = Course.batch,
    model_dim: int = Course.model_dim,
    num_heads: int = Course.num_heads,
    num_layers: int = Course.num_layers,
    positions: str = Course.positions,
    learning_rate: float = Course.learning_rate,
    warmup: int = Course.warmup,
    every: int = Course.every,
    windows: int = Course.windows,
    redraw_every: int = Course.redraw_every,
    device: str = "cpu",
    threads: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    force_resume: bool = False,
) -> Results:
    """Train a small language model around each backend, by turns on the same bytes; their curves.

    Args:
        backends: Names, `file.py:object`, modules; None stands for all that can be causal. Exact attention
            is always among them.
        text: A file of text in UTF-8; None: the sources of Python's standard library.
        budget_s: Seconds of training and evaluating, all backends together; a round of turns that would not
            fit into the rest is not begun.
        steps: Where to end, whatever is left of the budget: a multiple of `every`.
        size: Features, window or clusters of every backend that has them and is not told otherwise.
        options: {backend: {option: values}}; every combination is a variant.
        tokens: Of one window; what else there is to choose is said by `experiments.course.Course`.
        out: A folder for checkpoints, the best models, records and plots.
        resume: Go on with the run in `out`, as if it had not been interrupted.
        force_resume: Go on even where torch, threads, device or processor were others.

    Raises:
        DataError: If the text is none or too short, or a checkpoint is damaged or of another run.
    """
    chosen = course(
        tokens=tokens,
        batch=batch,
        model_dim=model_dim,
        num_heads=num_heads,
        num_layers=num_layers,
        positions=positions,
        learning_rate=learning_rate,
        warmup=warmup,
        every=every,
        windows=windows,
        redraw_every=redraw_every,
        device=device,
        threads=threads,
        seed=seed,
    )
    return run_training(
        variants(backends, size=size, options=options),
        chosen,
        Limit.of(budget_s, steps, chosen),
        text=text,
        out=out,
        resume=resume,
        force_resume=force_resume,
    )


def variants(
    backends: Sequence[Any] | None,
    *,
    size: int = DEFAULT_SIZE,
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
) -> tuple[Variant, ...]:
    """What is trained, exact attention first; every size that was not set is the same."""
    from efficient_attn.backends import list_backends, resolve

    positive_count("size", size)
    named = list(list_backends(causal=True) if backends is None else backends)
    chosen = select(named if YARDSTICK in named else [YARDSTICK, *named], options)

    def sized(variant: Variant) -> Variant:
        name = variant.target if isinstance(variant.target, str) else variant.backend
        option = resolve(variant.target).size_option
        if option is None or option in (options or {}).get(name, {}):
            return variant
        return with_size(variant, option, size)

    return tuple(sorted(map(sized, chosen), key=lambda variant: variant.backend != YARDSTICK))


def run_training(
    chosen: Sequence[Variant],
    course: Course,
    limit: Limit,
    *,
    text: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    force_resume: bool = False,
    command: Sequence[str] = (),
    plan: str | None = None,
    progress: Callable[[Step], None] | None = None,
) -> Results:
    """Train the variants; with `out` everything is written there, a checkpoint after every evaluation."""
    resume = resume or force_resume
    if resume and out is None:
        raise OptionError("resume needs out, the folder of the run to go on with.")
    machine = environment(command=command, device=course.device)
    with _threads(course.threads):
        learners = _learners(chosen, read_text(text, tokens=course.tokens), course)
        folder = None if out is None else open_folder(out, name="out", fresh=not resume)
        with nullcontext() if folder is None else only_writer(folder):
            book = Book(folder, learners, machine)
            notes = book.take_up(force=force_resume) if resume else []
            book.begin(plan)
            start = moment()
            complete = by_turns(learners, limit, book, progress)
            during = between(start, moment(), device=course.device)
            machine = {**book.machine, DURING: [*book.machine.get(DURING, []), during]}
            results = Results(
                book.records(),
                environment=machine,
                interrupted=not complete,
                notes=[*notes, *limit.notes(learners)],
            )
            if folder is not None:
                results.save(folder)
    return results


def samples(folder: str | Path, chosen: Sequence[Variant], count: int) -> Iterator[tuple[str, str]]:
    """What the best model of each variant writes after the beginning of a line: so many bytes, as text."""
    import torch

    from efficient_attn.transformer.generate import generate

    first = torch.tensor([list(_PROMPT)])
    for variant in chosen:
        path = model_path(Path(folder), variant)
        if not count or not path.exists():
            continue
        try:
            model = read_model(path, backend=variant.target)
            drawn = generate(model.extend, first, count, temperature=_TEMPERATURE)
            words = (_PROMPT + bytes(drawn[0].tolist())).decode("utf-8", errors="replace")
        except AttentionError as error:
            # One that cannot stream, or not so far.
            words = str(error)
        yield variant.label, plain(words).strip()


def _learners(chosen: Sequence[Variant], text: Text, course: Course) -> list[Learner]:
    """The models before their first steps."""
    for variant in chosen:
        try:
            # What is loaded or allocated at the first step of a kind belongs to no curve.
            with contained():
                Learner(variant, text, course).try_step()
        except AttentionError:
            raise
        except Exception as error:  # The backend may be anybody's code.
            raise OptionError(f"{variant.label} cannot be built into a model: {described(error)}") from None
    return [Learner(variant, text, course) for variant in chosen]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many threads of torch while the block runs."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
