"""Records that nobody measured, for tests of what is made from records."""

import json
from contextlib import contextmanager
from itertools import product

from efficient_attn.backends import SPECS
from efficient_attn.measure.record import Case, Record, append

LENGTHS = (256, 512, 1024, 2048)


def case(kind, label, tokens, **changes):
    given = {"num_heads": 2, "head_dim": 8, "dtype": "float32", "device": "cpu", "threads": 2, **changes}
    backend = given.pop("backend", label.partition("(")[0])
    return Case(kind=kind, backend=backend, label=label, tokens=tokens, **given)


def timed(label, tokens, times_s, **changes):
    """A time in which every call is a round."""
    about = case("time", label, tokens, **changes)
    return Record(case=about, times_s=tuple(times_s), round_sizes=(1,) * len(times_s))


def costs(labels=("exact", "window"), lengths=LENGTHS):
    """`exact` is quadratic in tokens, everything else linear; a point in time and one in memory each."""
    made = []
    for tokens in lengths:
        for power, label in enumerate(labels, start=1):
            seconds = 1e-6 * tokens * (tokens if label == "exact" else 64 * power)
            times_s = tuple(seconds * (1 + i / 1000) for i in range(9))
            made.append(Record(case=case("time", label, tokens), times_s=times_s, round_sizes=(3, 2, 2, 2)))
            made.append(Record(case=case("memory", label, tokens), peak_bytes=4096 * tokens))
    return made


def errors(labels=("performer-positive",), inputs=("gaussian(norm=1.0)",)):
    """Two sizes of each backend beside uniform attention, four draws each."""
    points = [("uniform attention", 0.2, {})]
    for label in labels:
        points += [(label, 1 / size, {"num_features": size, "seed": 0}) for size in (16, 64)]
    made = []
    for source, (label, value, options) in product(inputs, points):
        about = case("error", label, 64, inputs=source, options=options, of="output")
        draws = tuple(value * (1 + i / 10) for i in range(4))
        made.append(Record(case=about, output_relative_error=value, output_relative_error_draws=draws))
    return made


def folder(path, records, environment=None):
    """The folder of a run that ended."""
    path.mkdir(parents=True)
    (path / "records.jsonl").touch()
    for record in records:
        append(path / "records.jsonl", record)
    (path / "environment.json").write_text(json.dumps({"processor": "P", "torch": {}, **(environment or {})}))
    return path


@contextmanager
def forgotten():
    """Backends that are registered inside exist inside alone."""
    before = dict(SPECS)
    try:
        yield
    finally:
        SPECS.clear()
        SPECS.update(before)
