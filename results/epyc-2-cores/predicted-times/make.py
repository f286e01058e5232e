"""Makes this folder: times of attention at seven shapes, and how well three of them predict the other four.

Times are seconds of the processor on one thread, which other work on the machine moves less than it moves the
clock on the wall; backends take turns. `python results/epyc-2-cores/predicted-times/make.py` measures records
that are missing and prints the table; the shapes of PROBE up to 1024 tokens are the calls that predict.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from efficient_attn.measure import clock
from efficient_attn.measure.record import Case, Record, append, merge_rounds, read
from efficient_attn.measure.variants import YARDSTICK, select
from efficient_attn.measure.worker import measure
from efficient_attn.registry import SPECS
from efficient_attn.stats.estimates import call_time
from efficient_attn.stats.predicted_time import TimeModel, time_models
from efficient_attn.stats.predicted_time import crossover as crossover_of

HERE = Path(__file__).parent

# Batch, heads and head dimension; calls of more operations are left out.
PROBE = ((1, 1, 64), (1, 8, 32), (1, 2, 128))
UNSEEN = ((1, 4, 64), (1, 12, 64), (4, 8, 64), (1, 16, 128))
LENGTHS, LONGEST_PROBE, MOST = (256, 512, 1024, 2048, 4096), 1024, 20e9

# Lengths between which predicted crossovers are sought, four per doubling.
SOUGHT = tuple(round(32 * 2 ** (step / 4)) for step in range(49))

# Name of the file of each setting: causal, dtype.
SETTINGS = {"full": (False, "float32"), "causal": (True, "float32"), "bfloat16": (False, "bfloat16")}
ROUNDS, ROUND_S = 3, 0.02


def processor_time(call: Callable[[], object]) -> float:
    start = time.process_time()
    result = call()
    stop = time.process_time()
    del result
    return stop - start


def measure_missing(path: Path, *, causal: bool, dtype: str) -> None:
    stored = {record.case.key for record in read(path).records} if path.exists() else set()
    variants = [variant for variant in select(None) if variant.backend != "exact-dense"]
    for batch, heads, dim in (*PROBE, *UNSEEN):
        for tokens in LENGTHS:
            shape = {"batch": batch, "num_heads": heads, "head_dim": dim, "tokens": tokens}
            setting = {"causal": causal, "dtype": dtype, "device": "cpu", "threads": 1}
            cases = [(variant, variant.case(kind="time", **shape, **setting)) for variant in variants]
            if 4 * batch * heads * dim * tokens**2 > MOST:
                continue
            parts: dict[str, list[Record]] = {}
            missing = [(variant, case) for variant, case in cases if case.key not in stored]
            for number in range(ROUNDS):
                for variant, case in missing[::-1] if number % 2 else missing:
                    record = measure(case, target=variant.target, seconds=ROUND_S)
                    if record.status == "ok":
                        parts.setdefault(case.key, []).append(record)
            for rounds in parts.values():
                append(path, merge_rounds(rounds))


def shape_of(case: Case) -> tuple[int, int, int]:
    return case.batch, case.num_heads, case.head_dim


def crossover(times: dict[int, float], exact: dict[int, float]) -> float | None:
    """The last length at which the line through the differences of the medians per token falls below zero.

    Three rounds have no interval, so that the crossovers of `bench` do not exist here.
    """
    lags = [
        (tokens, (times[tokens] - exact[tokens]) / tokens) for tokens in sorted(times.keys() & exact.keys())
    ]
    falls = [(left, right) for left, right in pairwise(lags) if left[1] > 0 >= right[1]]
    if not falls or lags[-1][1] > 0:
        return None
    (start, here), (end, there) = falls[-1]
    return start + (end - start) * here / (here - there)


def report(name: str, records: list[Record]) -> None:
    groups: dict[tuple[int, int, int], list[Record]] = {}
    # Nothing is counted of forms that are no longer built: causal clusters.
    records = [
        record
        for record in records
        if not record.case.causal or SPECS[record.case.backend].capabilities.causal
    ]
    for record in records:
        groups.setdefault(shape_of(record.case), []).append(record)
    short = [record for shape in PROBE for record in groups[shape] if record.case.tokens <= LONGEST_PROBE]
    models = time_models(short)
    others = [record for record in records if record not in short]
    inside = sum(is_inside(models, record) for record in others)
    covered = crossed = inside_of_shape = times_of_shape = faster = speeds = 0
    for (batch, heads, dim), group in groups.items():
        sizes = {"batch": batch, "num_heads": heads, "head_dim": dim}
        times: dict[str, dict[int, float]] = {}
        for record in group:
            times.setdefault(record.case.label, {})[record.case.tokens] = call_time(record).median
        for label in times.keys() - {YARDSTICK} if (batch, heads, dim) in UNSEEN else ():
            if (tokens := crossover(times[label], times[YARDSTICK])) is not None:
                predicted = (models[label].speed(models[YARDSTICK], tokens=n, **sizes) for n in SOUGHT)
                _, low, high = crossover_of(dict(zip(SOUGHT, predicted, strict=True)))
                crossed += 1
                covered += low is not None and low <= tokens <= (high or float("inf"))
        # The use of `advise`: calls of one shape predict longer ones of this shape.
        of_shape = time_models([record for record in group if record.case.tokens <= LONGEST_PROBE])
        for record in (
            record for record in group if record.case.tokens > LONGEST_PROBE and record.case.label in of_shape
        ):
            label, tokens = record.case.label, record.case.tokens
            times_of_shape += 1
            inside_of_shape += is_inside(of_shape, record)
            if label != YARDSTICK:
                _, low, high = of_shape[label].speed(of_shape[YARDSTICK], tokens=tokens)
                speeds += 1
                faster += low <= times[YARDSTICK][tokens] / times[label][tokens] <= high
    print(
        f"{name}: three shapes: {inside} of {len(others)} times, {covered} of {crossed} crossovers of unseen "
        f"shapes inside; one shape: {inside_of_shape} of {times_of_shape} times, "
        f"{faster} of {speeds} speed-ups inside"
    )


def is_inside(models: dict[str, TimeModel], record: Record) -> bool:
    batch, heads, dim = shape_of(record.case)
    sizes = {"batch": batch, "num_heads": heads, "head_dim": dim, "tokens": record.case.tokens}
    _, low, high = models[record.case.label].time_s(**sizes)
    return low <= call_time(record).median <= high


if __name__ == "__main__":
    clock._time_on_cpu = processor_time
    for name, (causal, dtype) in SETTINGS.items():
        measure_missing(HERE / f"{name}.jsonl", causal=causal, dtype=dtype)
        report(name, list(read(HERE / f"{name}.jsonl").records))
