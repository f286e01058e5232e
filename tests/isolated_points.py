"""Points that are measured in a process of their own, and what became of it."""

import time
from pathlib import Path

from efficient_attn.measure.record import Case

SHARED = {"num_heads": 2, "head_dim": 8, "dtype": "float32", "device": "cpu", "threads": 1}

# The time limit of an endless backend; then, on a slow and busy machine, the time for a killed process to be
# gone, and for a healthy one to be called a few times.
TIMEOUT_S, GONE_S, ENOUGH_S = 2, 20, 300


def case_of(name, **changes):
    return Case(**{"kind": "time", "backend": name, "label": name, "tokens": 16, **SHARED, **changes})


def ask(isolated, name, **changes):
    return isolated(case_of(name, **changes), target=f"own.py:{name}", seconds=0.001)


def gone(pid):
    """Whether a process has ended; one that nobody has reaped yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def soon(condition, *, within_s):
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()
