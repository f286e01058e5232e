"""A backend for each key/value head: every head computes as its own backend, which the suite checks."""

import re
from dataclasses import replace

import pytest
import torch
from reference import random_qkv

import efficient_attn as ea
from efficient_attn.backends.by_head import ByHeadOptions, build
from efficient_attn.errors import DtypeError, OptionError, ShapeError
from efficient_attn.registry import NoOptions
from efficient_attn.testing import check_names

WINDOW = ("window", {"window": 7, "global_tokens": 2})
PERFORMER = ("performer-positive", {"num_features": 32})


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "heads", "rest"),
    [
        (9, 3, {"0,2": WINDOW}, "exact"),
        (4, 4, {"1": "linear-elu", "3": PERFORMER}, WINDOW),
        (4, 1, {0: WINDOW}, "exact"),
        (8, 4, {"1-2": WINDOW, "0": "linear-elu"}, "exact-dense"),
    ],
)
def test_every_head_is_that_of_its_backend(causal, query_heads, kv_heads, heads, rest):
    q, k, v = random_qkv(2, query_heads, kv_heads, 40, 40)
    mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) > 0.3
    backend = ea.build("by-head", head_dim=8, causal=causal, heads=heads, rest=rest).double()
    found, group = backend(q, k, v, key_mask=mask), query_heads // kv_heads
    entries = {int(h): e for key, e in backend.options.heads.items() for h in key.split(",")}
    for head in range(kv_heads):
        entry = entries.get(head, backend.options.rest)
        part = ea.build(entry["backend"], head_dim=8, causal=causal, **entry["options"]).double()
        queries = slice(head * group, (head + 1) * group)
        alone = part(q[:, queries], k[:, head : head + 1], v[:, head : head + 1], key_mask=mask)
        torch.testing.assert_close(found[:, queries], alone, rtol=1e-13, atol=1e-13)


def test_heads_that_are_all_exact_are_exact_to_the_bit():
    q, k, v = random_qkv(2, 6, 3, 40, 40)
    backend = ea.build("by-head", head_dim=8, causal=True, heads={"1": "exact"})
    assert torch.equal(backend(q, k, v), ea.build("exact", head_dim=8, causal=True)(q, k, v))


def test_options_that_were_written_as_json_are_the_same_options():
    options = ByHeadOptions(heads={"2,0": WINDOW, "4-5": "exact"}, rest=list(PERFORMER))
    assert list(options.heads) == ["0,2", "4,5"]
    assert ByHeadOptions(heads=options.heads, rest=options.rest) == options


@pytest.mark.slow
@pytest.mark.parametrize("rest", ["exact", "linear-elu"])
def test_a_mixture_keeps_the_promises_of_its_parts(rest):
    checks = [name for name in check_names() if name != "compiled_it_is_the_same"]
    spec = ea.spec("by-head")
    spec = replace(
        spec,
        options_type=NoOptions,
        capabilities=replace(spec.capabilities, cross=False, approximates_softmax=False),
        builder=lambda problem, options: build(problem, ByHeadOptions(heads={"0": WINDOW}, rest=rest)),
    )
    # A head alone is head 0, whose backend is another one's.
    apart = ("every_head_is_its_single_call", "grouped_queries_are_repeated_heads")
    reasons = dict.fromkeys(apart, "heads have backends of their own")
    ea.check(spec, only=checks, expected_failures=reasons)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, OptionError, "heads maps key/value heads to backends"),
        ({"heads": {"a": "window"}}, OptionError, "such as '0-5,8', not 'a'"),
        ({"heads": {"0,1": "window", "1": "exact"}}, OptionError, "a key/value head is named twice"),
        ({"heads": {"0": ("window", 3)}}, DtypeError, "A backend is a name, or a pair such as"),
        ({"heads": {"0": "by-head"}}, OptionError, "is another backend"),
        ({"heads": {"3": "window"}}, ShapeError, "heads names key/value head 3, and k has 3 heads"),
    ],
)
def test_wrong_heads_are_refused(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ea.build("by-head", head_dim=8, causal=True, **options)(*random_qkv(1, 3, 3, 8, 8))
