"""Points that are measured in a process of their own."""

from efficient_attn.measure.record import Case

SHARED = {"num_heads": 2, "head_dim": 8, "dtype": "float32", "device": "cpu", "threads": 1}


def case_of(name, **changes):
    return Case(**{"kind": "time", "backend": name, "label": name, "tokens": 16, **SHARED, **changes})
