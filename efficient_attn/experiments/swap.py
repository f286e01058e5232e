"""Swap the attention of a real model for other backends: what it then gives, and what it costs."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from efficient_attn.analysis.candidates import CANDIDATES
from efficient_attn.analysis.doubts import DURING, doubts
from efficient_attn.experiments.exchange import DEFAULT_SEEDS, Exchange, Texts, exchange
from efficient_attn.experiments.files import open_folder
from efficient_attn.experiments.folder import Book, describe, only_writer
from efficient_attn.experiments.results import Results
from efficient_attn.experiments.workload import Workload
from efficient_attn.measure.clock import in_turns
from efficient_attn.measure.conditions import between, moment
from efficient_attn.measure.environment import environment
from efficient_attn.problem import positive_count
from efficient_attn.sweep.records import Record
from efficient_attn.sweep.run import ROUNDS, Step, joined
from efficient_attn.sweep.sizes import MEAN_OF_VALUES
from efficient_attn.sweep.variants import Variant

# Where the environment of a run tells the origin of the model and its texts.
MODEL = "model"


def swap(
    model: Any,
    backends: Sequence[Any] | None = None,
    *,
    texts: Texts | None = None,
    tokenizer: Any = None,
    tokens: int | None = None,
    options: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    seeds: int = DEFAULT_SEEDS,
    by_layer: bool = False,
    name: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    threads: int | None = None,
    rounds: int = ROUNDS,
    seed: int = 0,
    out: str | Path | None = None,
) -> Results:
    """How far a transformers model with its attention swapped is from itself, and time and memory of both.

    Encoders are compared by their hidden states and embeddings, causal models by their next-token
    distributions. The attention is put back afterwards, whatever happens.

    Args:
        model: A local folder with config.json and safetensors; or a loaded model in eval mode, with its
            `tokenizer`.
        backends: Names, `file.py:object`, modules or functions f(q, k, v); None stands for all that is meant
            to come near softmax.
        texts: {name: text} or a list; None stands for six shipped ones.
        tokens: The beginning of each text that is read; None: 512, or what model and texts have.
        options: {backend: {option: values}}; every combination is a variant.
        seeds: Independent draws of random features.
        by_layer: Also swap each layer alone.
        name: What records call the model; None: as the folder or the class.
        dtype, device: Of a model from a folder.
        rounds: How often times are taken up, all backends by turns.
        out: A folder that every record is written to as soon as it exists.

    Raises:
        MissingPackageError: If transformers is not installed.
        OptionError, DataError, UnsupportedError: If the request makes no sense for this model.
    """
    asked = exchange(
        model,
        backends,
        texts=texts,
        tokenizer=tokenizer,
        tokens=tokens,
        options=options,
        seeds=seeds,
        by_layer=by_layer,
        name=name,
        workload=Workload(dtype=dtype, device=device, threads=threads, seed=seed),
    )
    return run_swap(asked, rounds=rounds, out=out)


def run_swap(
    asked: Exchange,
    *,
    rounds: int = ROUNDS,
    out: str | Path | None = None,
    command: Sequence[str] = (),
    progress: Callable[[Step], None] | None = None,
) -> Results:
    """Measure what each backend changes, then times in turns, then memory; with `out` all is written."""
    positive_count("rounds", rounds)
    device = asked.subject.shared["device"]
    machine = {
        **environment(command=command, device=device),
        MODEL: dict(asked.about),
        CANDIDATES: [one.label for one in asked.variants if one.backend != MEAN_OF_VALUES],
    }
    folder = None if out is None else open_folder(out, name="out", fresh=True)
    with nullcontext() if folder is None else only_writer(folder):
        if folder is not None:
            describe(folder, machine, None)
        book, start, complete = Book(folder, {}), moment(), False
        try:
            for record in _told(_measured(asked, rounds), points(asked), progress):
                book.add(record)
            complete = True
        except KeyboardInterrupt:
            pass
        machine[DURING] = [between(start, moment(), device=device)]
        results = Results(
            book.records,
            environment=machine,
            interrupted=not complete,
            notes=[*asked.notes, *doubts(book.records, machine)],
        )
        if folder is not None:
            results.save(folder)
    return results


def points(asked: Exchange) -> int:
    """How many records there will be at most."""
    # Every variant with all layers and with each alone, its time and memory; time and memory of the model
    # as it came, and its perplexity.
    return len(asked.variants) * (len(asked.layers) + 2) + 2 + asked.subject.predicts


def _measured(asked: Exchange, rounds: int) -> Iterator[Record]:
    """Every record, as soon as it is complete."""
    from efficient_attn.sweep.models import measure_memory, measure_own, measure_swap, own

    subject = asked.subject
    if subject.predicts:
        yield measure_own(subject)
    working: list[Variant] = [own()]
    for variant in asked.variants:
        whole = measure_swap(variant, subject, seeds=asked.seeds)
        yield whole
        if whole.status == "ok":
            working.append(variant)
            for layer in asked.layers[1:]:
                yield measure_swap(variant, subject, seeds=asked.seeds, layer=layer)
    yield from _times(asked, working, rounds)
    yield from map(partial(measure_memory, subject=subject), working)


def _times(asked: Exchange, variants: Sequence[Variant], rounds: int) -> Iterator[Record]:
    """All variants in turns; one that fails takes no further turn."""
    from efficient_attn.sweep.models import measure_time

    begun: dict[str, list[Record]] = {variant.label: [] for variant in variants}
    for variant in in_turns(list(variants), rounds=rounds):
        parts = begun.get(variant.label)
        if parts is None:
            continue
        parts.append(measure_time(variant, asked.subject))
        if parts[-1].status != "ok":
            yield parts[-1]
            del begun[variant.label]
        elif len(parts) == rounds:
            yield joined(parts)


def _told(records: Iterator[Record], total: int, progress: Callable[[Step], None] | None) -> Iterator[Record]:
    """The records, each told to the display."""
    begun = time.monotonic()
    for done, record in enumerate(records, start=1):
        if progress is not None:
            left_s = (time.monotonic() - begun) / done * max(total - done, 0)
            progress(
                Step(
                    done=done,
                    total=max(total, done),
                    remaining_s=left_s,
                    doing=record.case.label,
                    record=record,
                )
            )
        yield record
