"""Makes this folder: times of attention at seven shapes, and how well short calls predict longer ones.

Times are seconds of the processor on one thread, which other work on the machine moves less than it moves the
clock on the wall; backends take turns. `python results/epyc-2-cores/predicted-times/make.py` measures records
that are missing and prints the table; at every shape calls up to 1024 tokens predict the longer ones.
"""

import time
from collections.abc import Callable
from pathlib import Path

from efficient_attn.backends import SPECS
from efficient_attn.measure import clock
from efficient_attn.measure.record import Record, append, merge_rounds, read
from efficient_attn.measure.variants import YARDSTICK, select
from efficient_attn.measure.worker import measure
from efficient_attn.stats.estimates import call_time
from efficient_attn.stats.predicted_time import extrapolated

HERE = Path(__file__).parent

# Batch, heads and head dimension; calls of more operations are left out.
SHAPES = ((1, 1, 64), (1, 8, 32), (1, 2, 128), (1, 4, 64), (1, 12, 64), (4, 8, 64), (1, 16, 128))
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
    stored = {record.case.key for record in read(path).records} if path.exists() else set()
    variants = [variant for variant in select(None) if variant.backend != "exact-dense"]
    for batch, heads, dim in SHAPES:
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


def report(name: str, records: list[Record]) -> None:
    groups: dict[tuple[int, int, int], dict[str, dict[int, float]]] = {}
    for record in records:
        case = record.case
        # Causal clusters are no longer built.
        if not case.causal or SPECS[case.backend].capabilities.causal:
            times = groups.setdefault((case.batch, case.num_heads, case.head_dim), {})
            times.setdefault(case.label, {})[case.tokens] = call_time(record).median
    inside = times_in_all = covered = speeds = 0
    for times in groups.values():
        exact = times[YARDSTICK]
        for label, by_tokens in times.items():
            growth = SPECS[label.partition("(")[0]].capabilities.time_growth
            short, exact_short = (
                {tokens: time for tokens, time in side.items() if tokens <= LONGEST_PROBE}
                for side in (by_tokens, exact)
            )
            for tokens in (tokens for tokens in by_tokens if tokens > LONGEST_PROBE and len(short) > 2):
                _, low, high = extrapolated(short, tokens, growth)
                times_in_all += 1
                inside += low <= by_tokens[tokens] <= high
                if label != YARDSTICK:
                    _, exact_low, exact_high = extrapolated(exact_short, tokens)
                    speeds += 1
                    covered += exact_low / high <= exact[tokens] / by_tokens[tokens] <= exact_high / low
    print(f"{name}: {inside} of {times_in_all} times, {covered} of {speeds} speed-ups inside")


if __name__ == "__main__":
    clock._time_on_cpu = processor_time
    for name, (causal, dtype) in SETTINGS.items():
        measure_missing(HERE / f"{name}.jsonl", causal=causal, dtype=dtype)
        report(name, list(read(HERE / f"{name}.jsonl").records))
