"""Makes this folder: times of attention at seven shapes, and how well three of them predict the other four.

Times are seconds of the processor on one thread, which other work on the machine moves less than it moves the
clock on the wall; backends take turns. `python results/epyc-2-cores/predicted-times/make.py` measures records
that are missing and prints the table; the shapes of PROBE up to 1024 tokens are the calls that predict.
"""

import time
from collections.abc import Callable
from pathlib import Path

from efficient_attn.measure import clock
from efficient_attn.measure.clock import in_turns
from efficient_attn.runner.record import Case, Record, joined
from efficient_attn.runner.records import append, read
from efficient_attn.runner.variants import YARDSTICK, select
from efficient_attn.runner.worker import measure
from efficient_attn.stats.curves import curves
from efficient_attn.stats.predicted_time import time_models
from efficient_attn.stats.rounds import call_time
from efficient_attn.studies.bench.crossover import crossovers

HERE = Path(__file__).parent

# Batch, heads and head dimension; calls of more operations are left out.
PROBE = ((1, 1, 64), (1, 8, 32), (1, 2, 128))
UNSEEN = ((1, 4, 64), (1, 12, 64), (4, 8, 64), (1, 16, 128))
LENGTHS, LONGEST_PROBE, MOST = (256, 512, 1024, 2048, 4096), 1024, 20e9

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
    known = {record.case.key for record in read(path).records} if path.exists() else set()
    variants = [one for one in select(None) if one.backend != "exact-dense"]
    for batch, heads, dim in (*PROBE, *UNSEEN):
        for tokens in LENGTHS:
            shape = {"batch": batch, "num_heads": heads, "head_dim": dim, "tokens": tokens}
            setting = {"causal": causal, "dtype": dtype, "device": "cpu", "threads": 1}
            cases = [(one, one.case(kind="time", **shape, **setting)) for one in variants]
            if 4 * batch * heads * dim * tokens**2 > MOST:
                continue
            parts: dict[str, list[Record]] = {}
            for variant, case in in_turns([one for one in cases if one[1].key not in known], rounds=ROUNDS):
                record = measure(case, target=variant.target, seconds=ROUND_S)
                if record.status == "ok":
                    parts.setdefault(case.key, []).append(record)
            for found in parts.values():
                append(path, joined(found))


def shape_of(case: Case) -> tuple[int, int, int]:
    return case.batch, case.num_heads, case.head_dim


def report(name: str, records: list[Record]) -> None:
    short = [one for one in records if shape_of(one.case) in PROBE and one.case.tokens <= LONGEST_PROBE]
    models = time_models(short)
    inside = crossed = held = 0
    others = [one for one in records if one not in short]
    for record in others:
        batch, heads, dim = shape_of(record.case)
        sizes = {"batch": batch, "num_heads": heads, "head_dim": dim, "tokens": record.case.tokens}
        _, low, high = models[record.case.label].time_s(**sizes)
        inside += low <= call_time(record).median <= high
    for shape in UNSEEN:
        times = curves([one for one in records if shape_of(one.case) == shape], "time_s")
        for found in crossovers(times):
            if found.tokens is not None and not found.extrapolated:
                batch, heads, dim = shape
                _, low, high = models[found.label].crossover(
                    models[YARDSTICK], batch=batch, num_heads=heads, head_dim=dim
                )
                crossed += 1
                held += low is not None and low <= found.tokens <= (high or float("inf"))
    print(f"{name}: {inside} of {len(others)} times, {held} of {crossed} crossovers of unseen shapes inside")


if __name__ == "__main__":
    clock._time_on_cpu = processor_time
    for name, (causal, dtype) in SETTINGS.items():
        measure_missing(HERE / f"{name}.jsonl", causal=causal, dtype=dtype)
        report(name, list(read(HERE / f"{name}.jsonl").records))
