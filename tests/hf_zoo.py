"""Verdicts on exact attention in every architecture of transformers' mappings.

Run as a script, it writes its rows to tests/hf_zoo.tsv, from which docs/hugging_face_models.py writes a page.
"""

import csv
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hf_zoo_models import IMAGE, TOKENS, tiny_model
from torch import Tensor
from transformers.models.auto import modeling_auto

from efficient_attn.errors import AttentionError
from efficient_attn.integrations.transformers import ignored, register, swapped
from efficient_attn.integrations.transformers.sites import find_sites

MAPPINGS: dict[str, Any] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
RIGHT, REFUSED, WRONG, ERROR, NOT_BUILT = (
    *("right", "refused in words", "silently wrong", "error without words", "not built tiny"),
)
VERDICTS = (RIGHT, REFUSED, WRONG, ERROR, NOT_BUILT)
TABLE = Path(__file__).with_suffix(".tsv")

SECONDS = 40

# Difference from eager attention, relative to the largest output, above which exact attention is wrong.
# Weights are random and large, so that rounding grows over the layers.
TOLERANCE = 2e-3


class TooSlow(Exception):
    """An architecture took more than its time."""


def architectures(mappings: Any = MAPPINGS) -> Iterator[tuple[str, str, str]]:
    """Mapping, model type and class name of every entry."""
    for mapping in mappings:
        for kind, names in MAPPINGS[mapping].items():
            yield mapping, kind, names if isinstance(names, str) else names[0]


def batch(mapping: str, model: Any) -> tuple[dict[str, Any], Tensor | None]:
    """Inputs of a model, and the tokens of its output that are compared."""
    if mapping == "image":
        channels = getattr(model.config, "num_channels", 3)
        generator = torch.Generator().manual_seed(0)
        return {"pixel_values": torch.randn(2, channels, IMAGE, IMAGE, generator=generator)}, None
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 50, (3, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    if mapping == "seq2seq":
        return {"input_ids": ids * mask, "attention_mask": mask, "decoder_input_ids": ids[:, :10]}, None
    mask[0, :3] = 0
    given: dict[str, Any] = {"input_ids": ids * mask, "attention_mask": mask}
    return ({**given, "use_cache": False} if mapping == "causal" else given), mask.bool()


def output(model: Any, given: dict[str, Any], real: Tensor | None) -> Tensor:
    with torch.no_grad():
        found = model(**given)
    names = ("logits", "last_hidden_state", "prediction_logits")
    first: Tensor = next(
        (found[name] for name in names if name in found and found[name] is not None), found[0]
    )
    return first if real is None else first[real]


class Row(NamedTuple):
    """Verdict on one architecture.

    Attributes:
        before: The verdict at commit 990d42b, before exact attention served every feature of a model.
    """

    mapping: str
    model: str
    verdict: str
    reason: str
    before: str


def judged(mapping: str, model_type: str, class_name: str) -> tuple[str, str]:
    """The verdict on one architecture, and its reason."""
    try:
        with limited(), silent():
            model = tiny_model(model_type, class_name, decoder=mapping == "causal")
            given, real = batch(mapping, model)
            model.set_attn_implementation("eager")
            expected = output(model, given, real)
        if not bool(expected.isfinite().all()):
            return NOT_BUILT, "its output is not finite"
    except Exception as error:
        return NOT_BUILT, words(error)
    try:
        with limited(), silent():
            return compared(model, given, real, expected)
    except TooSlow as error:
        return NOT_BUILT, words(error)


def compared(model: Any, given: dict[str, Any], real: Tensor | None, expected: Tensor) -> tuple[str, str]:
    """The verdict on exact attention, attached and by name, and on an attached window that has to matter."""

    def change() -> float:
        return float((output(model, given, real) - expected).abs().max() / expected.abs().max())

    verdict, reason = tried(lambda: with_backend(model, change, "exact"))
    by_name, why = tried(lambda: named(model, change))
    if by_name in (WRONG, ERROR):
        return by_name, f"by name: {why}"
    if verdict != RIGHT:
        return verdict, reason
    rest = ignored(model)
    if rest:
        return RIGHT, f"outside of the interface: {', '.join(sorted(set(rest.values())))}"
    kinds = {site.kind for site in find_sites(model)}
    try:
        moved = with_backend(model, change, full=("window", {"window": 3})) if "full" in kinds else 1.0
    except AttentionError as error:
        return RIGHT, f"exact only: {words(error)}"
    return (RIGHT, "") if moved > 1e-5 else (WRONG, "a window of 3 keys changes nothing")


def tried(change: Callable[[], float]) -> tuple[str, str]:
    try:
        distance = change()
    except AttentionError as error:
        return REFUSED, words(error)
    except TooSlow:
        raise
    except Exception as error:
        return ERROR, f"{type(error).__name__}: {words(error)}"
    return (RIGHT, "") if distance <= TOLERANCE else (WRONG, f"off by {distance:.0e}")


def with_backend(model: Any, change: Callable[[], float], backend: Any = None, **kinds: Any) -> float:
    with swapped(model, backend, **kinds):
        return change()


def named(model: Any, change: Callable[[], float]) -> float:
    register()
    model.set_attn_implementation("efficient_attn.exact")
    try:
        return change()
    finally:
        model.set_attn_implementation("eager")


def words(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


@contextmanager
def limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlow(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def silent() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def read() -> list[Row]:
    """The committed rows."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [Row(**row) for row in csv.DictReader(file, delimiter="\t")]


def write(rows: Iterable[Row]) -> None:
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, delimiter="\t", lineterminator="\n")
        out.writerow(Row._fields)
        out.writerows(rows)


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    before = {(row.mapping, row.model): row.before for row in read()}
    write(
        Row(mapping, model, *judged(mapping, model, name), before.get((mapping, model), ""))
        for mapping, model, name in list(architectures())
    )


if __name__ == "__main__":
    main()
