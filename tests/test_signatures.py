"""Functions with the signatures of other libraries, checked by declared promises."""

import json

import pytest
import torch
import torch.nn.functional as F

import efficient_attn as ea
from efficient_attn.errors import DtypeError, OptionError, UnknownNameError, UnsupportedError
from efficient_attn.testing import adapt

# A few promises of each kind: formula, masks, causality, other lengths, grouped heads, scale, gradients.
FEW = (
    "equals_softmax_attention",
    "masked_keys_leave_no_gap",
    "later_values_move_no_output",
    "grouped_queries_are_repeated_heads",
    "scale_is_a_factor_on_the_scores",
    "gradients_are_those_of_finite_differences",
)
ALL = {"causal": True, "cross": True, "exact": True}


def attend(q, k, v, shown=None, factor=None):
    """softmax(factor · q kᵀ) v; a row without a visible key is zero."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q.shape[-1] ** -0.5 if factor is None else factor) * q @ k.mT
    if shown is not None:
        scores = scores.masked_fill(~shown, -torch.inf)
    return scores.softmax(dim=-1).nan_to_num() @ v


def triangle(q, k, axis):
    rows, keys = q.shape[axis], k.shape[axis]
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


def plain(q, k, v, key_mask=None, causal=False):
    assert q.shape[1] == k.shape[1], "grouped heads were not declared"
    shown = None if key_mask is None else key_mask[:, None, None]
    if causal:
        shown = triangle(q, k, -2) if shown is None else shown & triangle(q, k, -2)
    return attend(q, k, v, shown)


def flash_attn(q, k, v, causal=False, softmax_scale=None):
    shown = triangle(q, k, 1) if causal else None
    return attend(*(x.transpose(1, 2) for x in (q, k, v)), shown, softmax_scale).transpose(1, 2)


def linear(q, k, v, scale=None):
    """Causal linear attention without a feature map's denominator, as fla returns it: output and state."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = ((1.0 if scale is None else scale) * q @ k.mT).tril()
    return (weights @ v).transpose(1, 2), k.mT @ v


CASES = {
    "plain": (plain, {**ALL, "key_mask": True}),
    "sdpa": (F.scaled_dot_product_attention, {**ALL, "key_mask": True, "grouped": True}),
    "flash-attn": (flash_attn, {**ALL, "grouped": True}),
}


# The quick ones differ most: all promises by keyword, and another layout with fewer of them.
@pytest.mark.parametrize(
    "signature",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "plain")) for name in CASES],
)
def test_a_right_function_keeps_what_it_declares(signature):
    function, declared = CASES[signature]
    records = ea.check(adapt(function, signature=signature, **declared), only=FEW)
    outcomes = {record.check: record.outcome for record in records}
    unknown = {"plain": {"scale_is_a_factor_on_the_scores"}, "flash-attn": {"masked_keys_leave_no_gap"}}
    for name, outcome in outcomes.items():
        wanted = "could not check" if name in unknown.get(signature, ()) else "kept"
        assert outcome == wanted, (name, outcome)


@pytest.mark.parametrize("signature", CASES)
def test_adapted_functions_compute_what_exact_computes(signature):
    function, declared = CASES[signature]
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    for causal in (False, True):
        made = {"head_dim": 8, "num_heads": 4, "causal": causal}
        backend = ea.build(adapt(function, signature=signature, **declared), **made)
        torch.testing.assert_close(backend(q, k, k), ea.build("exact", **made)(q, k, k))


def test_linear_attention_of_fla_is_called_in_its_layout():
    backend = ea.build(adapt(linear, signature="fla", causal=True), head_dim=8, causal=True, scale=0.5)
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    torch.testing.assert_close(backend(q, k, v), (0.5 * q @ k.mT).tril() @ v)


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (
            lambda q, k, v, key_mask=None, causal=False: plain(q, k, v, None, causal),
            "masked_keys_leave_no_gap",
        ),
        (
            lambda q, k, v, key_mask=None, causal=False: plain(q, k, v, key_mask),
            "later_values_move_no_output",
        ),
        (lambda q, k, v, key_mask=None, causal=False: 1.01 * plain(q, k, v, key_mask, causal), FEW[0]),
        (
            lambda q, k, v, key_mask=None, causal=False: plain(q, k, v, key_mask, causal).detach() + 0 * q,
            "gradients_are_those_of_finite_differences",
        ),
    ],
    ids=["mask ignored", "causality ignored", "not softmax", "no gradient"],
)
def test_a_wrong_function_breaks_the_promise_that_it_declared(wrong, check):
    (record,) = ea.check(adapt(wrong, **ALL, key_mask=True), only=[check], on_fail="collect")
    assert record.outcome == "broken" and record.failed


@pytest.mark.parametrize(
    ("declared", "error", "words"),
    [
        ({"signature": "triton"}, UnknownNameError, "signature"),
        ({"layout": "sbhd"}, UnknownNameError, "layout"),
        ({"signature": "flash-attn", "key_mask": True}, UnsupportedError, "takes no key mask"),
        ({"signature": "fla"}, OptionError, "causal=True"),
        ({"function": 3}, DtypeError, r"its address file\.py:object is wanted"),
    ],
)
def test_wrong_declarations_name_the_argument(declared, error, words):
    with pytest.raises(error, match=words):
        adapt(**{"function": plain, **declared})


@pytest.mark.slow
def test_the_command_checks_declared_promises_of_a_function_in_a_file(tmp_path, capfd):
    main = pytest.importorskip("efficient_attn_cli.main", reason="needs an installation").main
    file = tmp_path / "mine.py"
    file.write_text(
        "def attend(q, k, v, causal=False, softmax_scale=None):\n"
        "    q, k, v = (x.transpose(1, 2) for x in (q, k, v))\n"
        "    w = (softmax_scale or q.shape[-1] ** -0.5) * q @ k.mT\n"
        "    return (w.softmax(dim=-1) @ v).transpose(1, 2)\n"
    )
    only = ("--only", "equals_softmax_attention,later_values_move_no_output", "--json")
    with pytest.raises(SystemExit) as ended:
        main(["check", f"{file}:attend", "--signature", "flash-attn", "--causal", "--exact", *only])
    assert ended.value.code == 1
    outcomes = {one["check"]: one["outcome"] for one in json.loads(capfd.readouterr().out)}
    assert outcomes["later_values_move_no_output"] == "broken"
