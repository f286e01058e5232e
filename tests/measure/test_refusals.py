"""What is refused before anything is measured, in words that name the argument and what would work."""

import math
from functools import partial

import pytest

from efficient_attn.errors import (
    AttentionError,
    DataError,
    DtypeError,
    OptionError,
    UnknownNameError,
    UnsupportedError,
)
from efficient_attn.measure.inputs import gaussian, read_activations
from efficient_attn.measure.isolation import Measurer
from efficient_attn.measure.record import read
from efficient_attn.measure.units import parse_bytes, parse_seconds, parse_sizes
from efficient_attn.measure.variants import parse_settings, select
from efficient_attn.studies.bench import plan

draw = partial(gaussian, **{"norm": 1.0, "tokens": 8, "head_dim": 4})
plan_on_cpu = partial(plan, device="cpu")
share_of = partial(parse_bytes, name="--memory-limit", available=1000)
seconds_of = partial(parse_seconds, name="--budget")
lengths_of = partial(parse_sizes, name="--seq-len")


def select_with(backend, setting):
    return select([backend], parse_settings([setting]))


REFUSED = [
    (draw, {"norm": 0.0}, OptionError, "norm is a finite number above 0, not 0.0"),
    (draw, {"norm": math.inf}, OptionError, "norm is a finite number above 0, not inf"),
    (draw, {"tokens": 0}, OptionError, "tokens is at least 1, not 0"),
    (draw, {"head_dim": 2.5}, DtypeError, "head_dim is a whole number, not 2.5"),
    (draw, {"seed": -1}, OptionError, "seed is at least 0, not -1"),
    (Measurer, {"isolate": "fork", "timeout_s": 1}, OptionError, "isolate is none, reuse, not 'fork'"),
    (Measurer, {"isolate": "reuse", "timeout_s": 0}, OptionError, "timeout_s is a number of seconds"),
    (plan_on_cpu, {"execution": "cuda-graph"}, UnsupportedError, "needs a CUDA device; device is 'cpu'"),
    (read_activations, {"path": "absent.safetensors"}, DataError, "Cannot read absent.* No such file"),
    (read, {"path": "nothing"}, DataError, "Cannot read records from nothing: No such file"),
    (select, {"backends": ["performer-trg"]}, UnknownNameError, "called 'performer-trg'. Did you mean"),
    (select, {"backends": ["softmax"]}, UnknownNameError, "Called 'exact' in this package"),
    (select, {"backends": ["exact", "exact"]}, OptionError, "Two of the backends are called 'exact'"),
    (select, {"backends": ["nowhere.py:f"]}, AttentionError, "nowhere.py"),
    *(
        (select_with, {"backend": backend, "setting": setting}, error, message)
        for backend, setting, error, message in (
            ("linformer", "linformer.rang=3", UnknownNameError, "Did you mean 'rank'"),
            ("linformer", "linformer.rank=many", DtypeError, "rank is a whole number, not 'many'"),
            ("linformer", "linformer.rank=0", OptionError, "rank"),
            ("exact", "linformer.rank=3", OptionError, "'linformer' is not a selected backend"),
            ("exact", "rank=3", OptionError, "--set cannot be"),
            ("exact", "linformer.rank", OptionError, "--set cannot be"),
            ("exact", "linformer.rank=", OptionError, "--set cannot be"),
            ("exact", ".rank=3", OptionError, "--set cannot be"),
            ("exact", "linformer.=3", OptionError, "--set cannot be"),
        )
    ),
    *(
        (lengths_of, {"text": text}, OptionError, r"^--seq-len [^\n]*$")
        for text in ("", "many", "-5", "0", "1.5", "256:512", "256:512:x1", "256:512:x", "512:256:x2",
                     "1:2:3:4", "9" * 30, "1:100000:1", "256 512", [0], [2.5], [True], [])
    ),
    *(
        (seconds_of, {"text": text}, OptionError, "^--budget is a duration such as 90s, 2m or 1h")
        for text in ("", "soon", "0", "-3s", "nan", "1e3", "2 weeks")
    ),
    *(
        (share_of, {"text": text}, OptionError, "^--memory-limit is an amount such as 8GiB or a share")
        for text in ("", "much", "0", "0%", "130%", "-1G", "8 apples")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "arguments", "error", "message"), REFUSED)
def test_a_wrong_request_is_refused_by_name(call, arguments, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        call(**arguments)
