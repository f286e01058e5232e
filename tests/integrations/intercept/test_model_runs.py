"""Replaced sites in models that recompute, compile or replicate their forward."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from called_models import two_layers
from torch import nn
from torch.utils.checkpoint import checkpoint

import efficient_attn as ea
from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.intercept.calls import RECOMPUTED

# The example runs without gradients, and the compiler reads those of inner tensors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
X = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BACKENDS = [("window", {"window": 3}), ("linear-hedgehog", {}), ("linformer", {"rank": 4})]


class Recomputing(torch.autograd.Function):
    """A checkpoint as models of diffusion write their own."""

    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        return None, *torch.autograd.grad(output, inputs, gradient)


def nested(function, *inputs):
    return checkpoint(partial(checkpoint, function, use_reentrant=False), *inputs, use_reentrant=False)


def offloaded(function, *inputs):
    with torch.autograd.graph.save_on_cpu():
        return function(*inputs)


def direct(function, *inputs):
    return function(*inputs)


REENTRANT, PLAIN = partial(checkpoint, use_reentrant=True), partial(checkpoint, use_reentrant=False)
CHECKPOINTS = [REENTRANT, PLAIN, nested, Recomputing.apply]
frozen = torch.no_grad()(direct)


class Layer(nn.Module):
    """Attention by a function that runs it, with a torch layer inside or none."""

    def __init__(self, run, *, inner=False):
        super().__init__()
        self.projection, self.run = nn.Linear(16, 48), run
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True) if inner else None

    def attend(self, q, k, v):
        if self.inner is not None:
            q, k, v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
            return self.inner(q, q, k + v, need_weights=False)[0].unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x):
        q, k, v = self.projection(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + v.transpose(1, 2).flatten(2) + self.run(self.attend, q, k, v).transpose(1, 2).flatten(2)


def model_of(*runs, **options):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(run, **options) for run in runs)).double()


def gradients(model):
    # A reentrant checkpoint allows no gradients of chosen tensors.
    model(X).square().sum().backward()
    return [x.grad for x in model.parameters()]


@pytest.mark.parametrize(("name", "options"), BACKENDS)
@pytest.mark.parametrize("run", CHECKPOINTS)
def test_a_call_in_a_checkpoint_inside_its_module_stays_exact_in_both_passes(run, name, options):
    model, reference = model_of(run, direct), model_of(direct, direct)
    replaced = ea.attach(model, name, example=lambda: model(X), **options)
    assert (replaced.left, replaced.served) == ({"0": RECOMPUTED}, {"1": name})
    ea.attach(reference, {"1": (name, options)}, example=lambda: reference(X))
    torch.testing.assert_close(gradients(model), gradients(reference))
    replaced.undo()
    with pytest.raises(UnsupportedError, match="0 cannot be served: it is called in a checkpoint or"):
        ea.attach(model, name, example=lambda: model(X), strict=True, **options)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compile)])
@pytest.mark.parametrize("run", CHECKPOINTS)
def test_a_checkpoint_that_the_example_does_not_show_is_refused_in_training(run, compiled):
    model = model_of(direct, direct)
    ea.attach(model, "window", window=3, example=lambda: model(X))
    model[1].run = run
    called = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(UnsupportedError, match=r"1 cannot be served: .* an example that shows this leaves"):
        called(X)


def test_generated_code_without_a_module_name_is_served():
    model, reference = torch.fx.symbolic_trace(model_of(direct)), model_of(direct)
    for x in (model, reference):
        ea.attach(x, "window", window=3, example=lambda x=x: x(X), strict=True)
    torch.testing.assert_close(model(X), reference(X), rtol=0, atol=1e-12)


@pytest.mark.parametrize("run", [frozen, offloaded, PLAIN, REENTRANT])
def test_calls_that_no_backward_pass_repeats_outside_of_their_module_stay_served(run):
    inner = run in (PLAIN, REENTRANT)
    model, reference = model_of(run, inner=inner), model_of(frozen if run is frozen else direct, inner=inner)
    exact = gradients(copy.deepcopy(reference))[0]
    for x in (model, reference):
        ea.attach(x, "linformer", rank=4, example=lambda x=x: x(X), strict=True)
    expected = gradients(reference)
    torch.testing.assert_close(gradients(model), expected)
    assert not torch.allclose(exact, expected[0])


def replica_of(module, factor):
    """A replica as nn.DataParallel makes it, with tensors times a factor."""
    replica = module._replicate_for_data_parallel()
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        setattr(replica, name, None if tensor is None else tensor.detach() * factor)
    replica._modules = {name: replica_of(child, factor) for name, child in module._modules.items()}
    return replica


@pytest.mark.parametrize(("name", "options"), [*BACKENDS, ("performer-positive", {"num_features": 8})])
@torch.no_grad()
def test_replicas_and_copies_run_their_own_tensors(name, options):
    model = model_of(direct, inner=True).eval()
    with ea.attach(model, name, example=lambda: model(X), **options):
        expected, scaled = model(X), copy.deepcopy(model)
        for x in (*scaled.parameters(), *scaled.buffers()):
            x.mul_(0.5)
        torch.testing.assert_close(replica_of(model, 0.5)(X), scaled(X))
        assert torch.equal(model(X), expected) and not torch.allclose(scaled(X), expected)


def in_part(model):
    model[0] = torch.compile(model[0], backend="eager")
    model[1].compile(backend="eager")
    return model


@pytest.mark.compile
@pytest.mark.parametrize("compiled", [partial(torch.compile, backend="eager"), in_part])
@torch.no_grad()
def test_a_compiled_model_is_served_by_the_names_of_the_original(compiled):
    torch.manual_seed(0)
    model, x = two_layers(), X.float()
    exact = model(x)
    with ea.attach(model, {"0": ("window", {"window": 3})}, example=lambda: model(x)):
        expected = model(x)
    model = compiled(model)
    assert torch.equal(model(x), exact)
    with ea.intercept.capture(model) as captured:
        model(x)
    assert list(map(str, captured.sites)) == ["0", "1"]
    with ea.attach(model, {"0": ("window", {"window": 3})}, example=lambda: model(x)) as replaced:
        assert torch.equal(model(x), expected) and not torch.allclose(expected, exact)
        # Compiled calls are not counted.
        assert replaced.calls == {"0": {}}
    assert torch.equal(model(x), exact)


@pytest.mark.compile
def test_a_compiled_function_is_named():
    model = model_of(torch.compile(direct, backend="eager"))
    with pytest.raises(UnsupportedError, match=r"0 cannot be served: it is called in a compiled function \("):
        ea.attach(model, "window", example=lambda: model(X))
