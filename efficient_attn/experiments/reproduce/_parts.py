"""Measurement part by part; parts that exceed the budget are reported."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from efficient_attn.experiments.reproduction import Setting
from efficient_attn.sweep.records import Record
from efficient_attn.sweep.run import Step


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Run torch with `count` threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Part(NamedTuple):
    """Records that are measured together.

    Attributes:
        name: Name in the progress display.
        measure: Gives the records.
        empty: The same records without a number, should there be no time for it.
    """

    name: str
    measure: Callable[[], Iterable[Record]]
    empty: Sequence[Record]


def measure_parts(
    parts: Sequence[Part],
    setting: Setting,
    *,
    emit: Callable[[Record], None],
    progress: Callable[[Step], None] | None,
) -> bool:
    """Measure the parts in order, as long as the slowest so far would fit once more; False: interrupted."""
    start, slowest = time.monotonic(), 0.0
    record: Record | None = None

    def tell(done: int, remaining_s: float, doing: str | None) -> None:
        if progress is not None:
            progress(Step(done=done, total=len(parts), remaining_s=remaining_s, doing=doing, record=record))

    for done, part in enumerate(parts):
        begun = time.monotonic()
        left = setting.budget_s - (begun - start)
        tell(done, slowest * (len(parts) - done), part.name)
        if done and slowest > left:
            reason = f"would take about {slowest:.0f} s, {left:.0f} s of the budget are left"
            for record in part.empty:
                emit(replace(record, status="skipped", reason=f"{reason} (raise it with --budget)"))
            continue
        try:
            with _threads(setting.threads):
                for record in part.measure():
                    emit(record)
        except KeyboardInterrupt:
            return False
        slowest = max(slowest, time.monotonic() - begun)
    tell(len(parts), 0.0, None)
    return True
