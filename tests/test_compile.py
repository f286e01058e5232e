"""Backends under torch.compile, without the runtime shape checks: `pytest -m compile`."""

import pytest
import torch

import efficient_attn as ea

pytestmark = pytest.mark.compile

TOKENS, HEAD_DIM, SIZE = 16, 8, 5
CASES = [
    (name, causal)
    for name in ea.list_backends()
    for causal in (False, True)
    if ea.spec(name).capabilities.compile and ea.spec(name).capabilities.causal >= causal
]


def build(name: str, causal: bool) -> ea.Backend:
    size = ea.spec(name).size_option
    # Odd sizes suit a window, even ones cosines and sines.
    options = {} if size is None else {size: SIZE if name == "window" else SIZE + 1}
    return ea.build(name, head_dim=HEAD_DIM, max_tokens=TOKENS, causal=causal, **options)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_a_compiled_backend_gives_the_same_output_and_gradients(name: str, causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 1, 2, TOKENS, HEAD_DIM, generator=generator, dtype=torch.float64).unbind()
    backend = build(name, causal).double()
    if backend.needs_calibration:
        backend.calibrate(*inputs[:2])

    def results(call: torch.nn.Module) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = call(*leaves)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]

    compiled = torch.compile(backend, fullgraph=True, backend="aot_eager")
    for got, expected in zip(results(compiled), results(backend), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_the_runtime_shape_checks_are_off_here() -> None:
    from efficient_attn.ops.softmax.definition import softmax_attention

    assert not hasattr(softmax_attention, "__wrapped__")
