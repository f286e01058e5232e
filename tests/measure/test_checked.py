"""No study takes something else for the output of an attention: what came is the record's reason."""

import math

import pytest
import torch
from isolated_points import case_of
from torch import nn

from efficient_attn import mse, recall
from efficient_attn.measure.error import WrongOutputError, check_gradients, outputs_checked
from efficient_attn.measure.worker import measure
from efficient_attn.studies.show import show


def attend(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v


def one_nan(q, k, v):
    output = attend(q, k, v)
    return torch.where(output == output.max(), math.nan, output)


# Functions of q, k and v that give no output, and what is said of it for tensors [1, 2, 16, 8] in float32.
WRONG = {
    "nothing": (
        lambda q, k, v: None,
        "the output is None; expected a tensor [1, 2, 16, 8] of torch.float32",
    ),
    "pair": (lambda q, k, v: (v, v), "the output is of type tuple; expected"),
    "broadcast": (lambda q, k, v: v.mean(dim=-2, keepdim=True), "output has shape [1, 2, 1, 8]; expected"),
    "axes": (lambda q, k, v: v.transpose(1, 2), "the output has shape [1, 16, 2, 8]; expected"),
    "double": (lambda q, k, v: v.double(), "the output has dtype torch.float64; expected"),
    "nan": (one_nan, "1 of 256 entries of the output are not finite"),
    "infinite": (lambda q, k, v: v / 0, "256 of 256 entries of the output are not finite"),
}


@pytest.mark.parametrize("kind", ["time", "memory"])
@pytest.mark.parametrize("of", ["attention", "block", "encoder"])
@pytest.mark.parametrize("name", WRONG)
def test_a_backend_that_returns_no_output_is_an_error_that_says_what_came(name, of, kind):
    wrong, said = WRONG[name]
    record = measure(case_of(name, kind=kind, of=of, layers=2 if of == "encoder" else None), target=wrong)
    assert record.status == "error" and said in record.reason, record
    assert record.times_s is None and record.peak_bytes is None


class NoGradient(torch.autograd.Function):
    """Gives each input the gradient that a test wants."""

    @staticmethod
    def forward(ctx, q, k, v):
        return attend(q, k, v)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, gradient / 0


GRADIENTS = {
    "detached": (lambda q, k, v: attend(q.detach(), k, v), "no gradient reached q."),
    "two": (lambda q, k, v: attend(q, k.detach(), v.detach()), "no gradient reached k, v."),
    "none": (NoGradient.apply, "no gradient reached k."),
    "infinite": (
        lambda q, k, v: NoGradient.apply(q, k, v) + 0 * k.sum(),
        "256 of 256 entries of the gradient of v are not finite.",
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_backward_pass_that_loses_gradients_or_makes_them_infinite_is_an_error(name):
    wrong, said = GRADIENTS[name]
    record = measure(case_of(name, backward=True), target=wrong)
    assert record.status == "error" and said in record.reason, record


def test_a_block_around_a_detached_output_is_an_error_of_the_parameters_that_lose_their_gradient():
    record = measure(case_of("f", backward=True, of="block"), target=lambda *qkv: attend(*qkv).detach())
    assert record.status == "error" and "no gradient reached attention.in_proj_weight" in record.reason


@pytest.mark.parametrize("of", ["attention", "block", "encoder"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["exact", "performer-trig", "window-clusters", "attend"])
def test_what_is_right_is_measured(name, backward, of):
    case = case_of(name, backward=backward, of=of, layers=1 if of == "encoder" else None)
    record = measure(case, target=attend if name == "attend" else name)
    assert record.status == "ok" and record.times_s, record


def test_parameters_that_a_backend_does_not_use_need_no_gradient():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.spare = nn.Parameter(torch.ones(3))

        def forward(self, q, k, v):
            return attend(q, k, v)

    assert measure(case_of("f", backward=True, of="block"), target=Spare()).status == "ok"


def test_what_is_not_finite_already_is_not_held_against_a_backend():
    from efficient_attn.backends import build

    backend = build(attend, head_dim=8)
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    with outputs_checked(backend):
        backend(q, k, v * math.inf)
        backend(q, k[..., :0, :], v[..., :0, :])
    assert not backend._forward_hooks


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_numbers_are_checked_in_every_dtype(dtype):
    check_gradients({"q": torch.ones(3, dtype=dtype), "k": None}, optional=["k"])
    with pytest.raises(WrongOutputError, match="1 of 3 entries of the gradient of q"):
        check_gradients({"q": torch.tensor([1.0, math.nan, 2.0], dtype=dtype)})


@pytest.mark.parametrize("name", WRONG)
def test_errors_maps_and_trainings_refuse_what_is_no_output_too(name):
    wrong, _ = WRONG[name]
    record = mse([wrong], inputs="gaussian", seq_lens=16, norms=(1,), sizes=(4,)).records[-1]
    assert record.status == "error" and record.reason.startswith("WrongOutputError: "), record
    (note,) = show([wrong]).notes
    assert ": WrongOutputError: " in note
    record = recall([wrong], steps=1, seeds=1, sizes=(4,), pairs=16).records[-1]
    assert record.status == "error" and record.reason.startswith("WrongOutputError: "), record


class Flat(nn.Module):
    def forward(self, q, k, v, key_mask):
        return v.mean(dim=-2, keepdim=True)
