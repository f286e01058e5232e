"""The task of associative recall at a small size, and cases of it."""

from made_records import case

from efficient_attn.studies.recall.plan import Course, Task

TASK = Task(pairs=12, classes=4, queries=5, gap=4)


def asked(backend="exact", **changes):
    given = {"num_heads": 2, "head_dim": 8, "threads": 1, **changes}
    return case(
        "recall", backend, TASK.tokens, inputs=Course(task=TASK, steps=1, batch=3, rate=1).name, **given
    )
