"""Functions with the signatures of other libraries, checked by declared promises."""

import pytest
import torch
import torch.nn.functional as F

import efficient_attn as ea
from efficient_attn.errors import DtypeError, UnknownNameError, UnsupportedError
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


# Functions with what they declare, and the check that cannot be made of it.
CASES = {
    "plain": (plain, {**ALL, "key_mask": True}, "scale_is_a_factor_on_the_scores"),
    "sdpa": (F.scaled_dot_product_attention, {**ALL, "key_mask": True, "grouped": True}, None),
    "flash-attn": (flash_attn, {**ALL, "grouped": True}, "masked_keys_leave_no_gap"),
}


@pytest.mark.slow
@pytest.mark.parametrize("signature", CASES)
def test_a_right_function_keeps_what_it_declares(signature):
    function, declared, unknown = CASES[signature]
    records = ea.check(adapt(function, signature=signature, **declared), only=FEW)
    outcomes = {record.check: record.outcome for record in records}
    assert outcomes == {check: "skipped, undeclared" if check == unknown else "kept" for check in FEW}


@pytest.mark.parametrize("signature", CASES)
def test_adapted_functions_compute_what_exact_computes(signature):
    function, declared, _ = CASES[signature]
    q, k, mask = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.arange(5)[None].expand(2, 5) < 4
    for causal in (False, True):
        sizes = {"head_dim": 8, "num_heads": 4, "causal": causal}
        backend = ea.build(adapt(function, signature=signature, **declared), **sizes)
        for key_mask in (None, mask) if declared.get("key_mask") else (None,):
            expected = ea.build("exact", **sizes)(q, k, k, key_mask=key_mask)
            torch.testing.assert_close(backend(q, k, k, key_mask=key_mask), expected)


@pytest.mark.parametrize(
    ("declared", "error", "words"),
    [
        ({"signature": "triton"}, UnknownNameError, "signature"),
        ({"signature": "flash-attn", "key_mask": True}, UnsupportedError, "takes no key mask"),
        ({"function": 3}, DtypeError, r"its address file\.py:object is wanted"),
    ],
)
def test_wrong_declarations_name_the_argument(declared, error, words):
    with pytest.raises(error, match=words):
        adapt(**{"function": plain, **declared})
