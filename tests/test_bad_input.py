"""Every wrong call ends in one line that names the argument, what came and what would work."""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from synthetic_records import case

import efficient_attn as ea
from efficient_attn.errors import (
    AttentionError,
    DataError,
    DtypeError,
    OptionError,
    UnknownNameError,
    UnsupportedError,
)
from efficient_attn.integrations.assignment_files import read_assignment
from efficient_attn.measure.inputs import gaussian, read_activations
from efficient_attn.measure.isolation import Measurer
from efficient_attn.measure.record import Record, append, read
from efficient_attn.measure.texts import read_text
from efficient_attn.measure.units import parse_bytes, parse_seconds, parse_sizes
from efficient_attn.measure.variants import CEILING, parse_settings, select


def built(name="exact", *, head_dim=8, num_heads=None, **options):
    return ea.build(name, head_dim=head_dim, num_heads=num_heads, **options)


Q, K = torch.zeros(2, 4, 6, 8), torch.zeros(2, 2, 6, 8)


def called_with(**arguments):
    return built()(Q, K, K, **arguments)


def masked(key_mask):
    return called_with(key_mask=key_mask)


# What no backend accepts is refused by name in the conformance suite; here are requests that have a remedy.
WRONG_CALLS = {
    ea.ShapeError: [
        (lambda: built(num_heads=3)(Q, K, K), r"q has 4 heads.*built with num_heads=3\.$"),
        (lambda: built(num_heads=4)(Q.transpose(1, 2), K, K), r"num_heads=4.*give x\.transpose\(1, 2\)"),
        (lambda: built()(Q, Q[:, :3], Q[:, :3]), r"q has 4 heads and k has 3; the heads of k divide"),
        (lambda: built()(Q, K, Q), r"v has 4 heads and k has 2; they are equal"),
        (lambda: built()(Q, K.to("meta"), K), r"k lies on meta and q on cpu; move one"),
        (lambda: masked(torch.ones(2, 1, 6, 6).bool()), r"\[2, 1, 6, 6\]. A pattern of query and key is no"),
        (lambda: built(causal=True)(Q, K[:, :, :5], K[:, :, :5]), r"q has 6 tokens and k has 5; causal"),
        (
            lambda: built("linformer", max_tokens=5, rank=2)(Q, K, K),
            r"k has 6\. Build it with max_tokens=6 or",
        ),
        (lambda: built(causal=True).extend(Q[:, :, :2], K, K), r"q has 2 tokens and k has 6"),
    ],
    DtypeError: [
        (lambda: masked(torch.ones(2, 6).long()), r"= \[2, 6\].*torch\.int64\. Give key_mask\.bool\(\)"),
        (lambda: masked(torch.zeros(2, 6)), r"torch\.float32\. A mask of 0 and -inf becomes \(mask == 0\)"),
        (lambda: built("window", window=2.5), r"window is a whole number, not 2\.5"),
    ],
    UnknownNameError: [
        (lambda: called_with(attn_mask=None), r"'attn_mask'\. Called 'key_mask'.*True for a real token"),
        (lambda: called_with(key_padding_mask=None), r"'key_padding_mask'.*the opposite of torch's"),
        (
            lambda: called_with(is_causal=True),
            r"'is_causal'.*when the backend is built: build\(.*causal=True",
        ),
        (
            lambda: built("perfomer-trig"),
            r"'perfomer-trig'\. Did you mean 'performer-trig'\? Known: bigbird,",
        ),
        (lambda: built("performer-trig", dropout=0.1), r"'dropout'.*no other backend has it"),
        (lambda: built("performer-positive", projection="id"), r"projection .* 'id'\. .*Known: iid,"),
        (lambda: built("math:sofmax"), r"No object in math is called 'sofmax'"),
    ],
    OptionError: [
        (lambda: built("performer-trig", num_features=7), r"num_features=7 is odd.*6 or 8"),
        (lambda: built("performer-trig", seed=10**30), r"seed is at most 9\d{18}, not 10"),
        (lambda: built(dropout=1.0), r"dropout is at least 0 and below 1, not 1"),
        (lambda: built(scale=float("nan")), r"scale is a finite number, not nan"),
        (lambda: built(head_dim=0), r"head_dim is at least 1, not 0"),
    ],
    UnsupportedError: [
        (lambda: built().redraw(1), r"'exact' has no random features; nothing to redraw"),
        (lambda: built("performer-positive").denominators(Q, K), r"features are positive"),
        (lambda: built("performer-positive").keys_read(Q, K), r"reads no keys one by one; 'window' and"),
        (lambda: ea.attention(Q, K, K, "performer-positive"), r"random draw: build it once with ea\.build"),
    ],
    DataError: [(lambda: built("nowhere.py:mine"), r"no file 'nowhere\.py' to take a backend from")],
}


draw = partial(gaussian, **{"norm": 1.0, "tokens": 8, "head_dim": 4})
share_of = partial(parse_bytes, name="--memory-limit", available=1000)
seconds_of = partial(parse_seconds, name="--budget")
lengths_of = partial(parse_sizes, name="--seq-len")


def select_with(backend, setting):
    return select([backend], parse_settings([setting]))


# Of what measures: function, arguments, error, message.
REFUSED = [
    (draw, {"norm": math.inf}, OptionError, "norm is a finite number above 0, not inf"),
    (Measurer, {"isolate": "fork", "timeout_s": 1}, OptionError, "isolate is none, reuse, not 'fork'"),
    (Measurer, {"isolate": "reuse", "timeout_s": 0}, OptionError, "timeout_s is a finite number above 0"),
    (read_activations, {"path": "absent.safetensors"}, DataError, "Cannot read absent.* No such file"),
    (read, {"path": "nothing"}, DataError, "Cannot read records from nothing: No such file"),
    (select, {"backends": ["softmax"]}, UnknownNameError, "Called 'exact' in this package"),
    (select, {"backends": ["exact", "exact"]}, OptionError, "Two of the backends are called 'exact'"),
    *(
        (select_with, {"backend": backend, "setting": setting}, error, message)
        for backend, setting, error, message in (
            ("linformer", "linformer.rang=3", UnknownNameError, "Did you mean 'rank'"),
            ("linformer", "linformer.rank=many", DtypeError, "rank is a whole number, not 'many'"),
            ("exact", "linformer.rank=3", OptionError, "'linformer' is not a selected backend"),
            *(
                ("exact", text, OptionError, "--set cannot be")
                for text in ("linformer.rank=", "linformer.rank", "linformer.=3", ".rank=3", "rank=3", "=")
            ),
        )
    ),
    *(
        (lengths_of, {"text": text}, OptionError, r"^--seq-len [^\n]*$")
        for text in ("", "many", "0", "1.5", "256:512:x1", "512:256:x2", "9" * 30, [2.5], [True], [])
    ),
    *(
        (seconds_of, {"text": text}, OptionError, "^--budget is a duration such as 90s, 2m or 1h")
        for text in ("", "0", "nan", "2 weeks")
    ),
    *(
        (share_of, {"text": text}, OptionError, "^--memory-limit is an amount such as 8GiB or a share")
        for text in ("", "0", "130%", "8 apples")
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        *((error, *row) for error, rows in WRONG_CALLS.items() for row in rows),
        *((error, partial(call, **arguments), message) for call, arguments, error, message in REFUSED),
    ],
)
def test_a_wrong_call_ends_in_one_line_that_says_what_would_work(error, call, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, AttentionError)
    assert "\n" not in str(caught.value)


READERS = {
    "records.jsonl": ea.read,
    "environment.json": lambda path: ea.read(path.parent),
    "plan.json": read_assignment,
    "text.txt": lambda path: read_text(path),
    "q.safetensors": read_activations,
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
@pytest.mark.parametrize("name", READERS)
def test_pipes_and_devices_are_read_by_no_reader(name, tmp_path):
    path = tmp_path / name
    (tmp_path / "records.jsonl").write_text("")
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        path.unlink(missing_ok=True)
        make(path)
        with pytest.raises(DataError, match=f"{name}.*not a regular file") as caught:
            READERS[name](path)
        assert "\n" not in str(caught.value)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="annot write"):
        append(path, Record(case=case("time", "exact", 1)))


MODEL, LINFORMER = {"model": "models.py:make_same"}, {"backends": ["linformer"]}

# Options of studies, beside what asks for a quick run; test_study_commands.py has those that all have.
WRONG_STUDIES = [
    ("advise", {"texts": ["a"]}, OptionError, "MODEL is missing. Attention without a model: .* bench"),
    ("advise", {**MODEL, "seq_lens": (512,)}, OptionError, "seq_lens has no effect with this model"),
    ("advise", {**MODEL, "max_kl": 0.05}, OptionError, "max_kl has no effect here; use min_cosine"),
    ("advise", {**MODEL, "min_cosine": 99.0}, OptionError, "min_cosine is a number from 0 to 1, not 99.0"),
    ("bench", {"of": "words"}, OptionError, "of is attention, block, encoder, not 'words'"),
    ("bench", {"of": "block", "backends": [CEILING]}, OptionError, "is not a backend: it is measured with"),
    ("bench", {"decode": True, "backward": True}, OptionError, "decode is of attention alone"),
    ("bench", {"executor": ThreadPoolExecutor(1)}, OptionError, "executor: the rounds of this run"),
    ("bench", {"device": "cuda:99"}, AttentionError, "device cannot be 'cuda:99'"),
    ("bench", {"column": "flops"}, UnknownNameError, "column is called .flops.. Known: corr, keys, mse,"),
    ("bench", {"max_error": 0.0}, OptionError, "max_error is a finite number"),
    ("bench", {"inputs": "encoder", "num_heads": 4}, AttentionError, "inputs decide the shape of attention"),
    ("bench", {"layers": [3]}, AttentionError, "layer 3 is not in encoder; it has 0, 1, 5"),
    ("mse", {"of": "heads"}, OptionError, "of is output, kernel or weights, not 'heads'"),
    ("mse", {"of": "weights", "metric": "mse"}, OptionError, "metric has no effect on the error of the weig"),
    ("mse", {"of": "weights", "seq_lens": 1024}, OptionError, "seq_lens of weights is at most 512, not 1024"),
    ("mse", {"angles": (60.0,)}, OptionError, "angles has no effect on the error of the output"),
    ("mse", {"metric": "msee"}, UnknownNameError, "No metric is called 'msee'. Did you mean 'mse'"),
    ("mse", {"inputs": "absent.safetensors"}, DataError, r"no such file\. Known: gaussian, encoder"),
    (
        "mse",
        {**LINFORMER, "options": {"linformer": {"rank": [25]}}},
        OptionError,
        "rank=25 is more than max_",
    ),
    ("mse", {"executor": object()}, AttentionError, "executor is an object with submit, such as"),
    ("mse", {"executor": ThreadPoolExecutor}, AttentionError, "executor is an object with submit, such as"),
    ("mse", {"progress": "yes"}, AttentionError, "progress is a function of a Progress, such as print"),
    ("mse", {"budget_s": "30s"}, AttentionError, "budget_s is a number, not '30s'"),
    ("recall", {"pairs": 63}, AttentionError, "pairs=63 is no multiple of 16"),
    ("recall", {"resume": True}, AttentionError, "resume needs out"),
    ("show", {"tokens": "500:513"}, AttentionError, "tokens are a range within 0:512"),
    ("show", {"inputs": "gaussian"}, AttentionError, "Gaussian draws have no words"),
]
BESIDE = {
    "bench": {"backends": ["exact"]},
    "mse": {"backends": ["window"], "inputs": "gaussian", "seq_lens": 24, "head_dim": 4, "sizes": (4, 8)},
}


@pytest.mark.parametrize(("study", "wrong", "error", "message"), WRONG_STUDIES)
def test_a_wrong_option_of_a_study_is_refused_before_anything_is_measured(
    study, wrong, error, message, called_models
):
    with pytest.raises(error, match=message) as caught:
        getattr(ea, study)(**BESIDE.get(study, {}) | wrong)
    assert "\n" not in str(caught.value)
