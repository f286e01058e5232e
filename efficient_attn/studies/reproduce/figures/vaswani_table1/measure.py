"""The layers of Table 1 of Vaswani et al. 2017, and the measurements of one layer."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from efficient_attn.backends import build
from efficient_attn.measure.operations import count_operations
from efficient_attn.measure.paths import hops_to_the_first_token
from efficient_attn.runner.records import Case, Record
from efficient_attn.runner.worker import answer, time_of
from efficient_attn.studies.reproduce.figures.vaswani_table1.claims import OPERATIONS, PATH, TIME
from efficient_attn.transformer.mixers import ConvolutionMixer, RecurrentMixer, SeparableConvolutionMixer


class SelfAttention(nn.Module):
    """A backend alone, as the table counts it: x is queries, keys and values, cut into heads."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._head_dim = case.head_dim
        self.backend = build(case.backend, head_dim=case.head_dim, num_heads=case.num_heads, **case.options)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, self._head_dim)).transpose(1, 2)  # [batch heads tokens head_dim]
        return self.backend(heads, heads, heads).transpose(1, 2).flatten(2)


def measure(case: Case, *, seconds: float = 0.1) -> Record:
    """The record of a case: time, operations, or length of the path."""
    return answer(case, partial(_MEASURES[case.of], case, seconds))


def _time(case: Case, seconds: float) -> Record:
    layer, x = _layer(case), _tokens(case)
    with torch.no_grad():
        return time_of(case, lambda: layer(x), seconds=seconds)


def _operations(case: Case, seconds: float) -> Record:
    layer = _layer(case)
    # Nothing is hidden in an LSTM on the CPU, and thousands of steps are faster there.
    device = "cpu" if isinstance(layer, RecurrentMixer) else "meta"
    layer, x = layer.to(device), _tokens(case).to(device)
    counted = count_operations(lambda: layer(x))
    return Record(case=case, flops=counted.flops, sequential_operations=counted.sequential)


def _path(case: Case, seconds: float) -> Record:
    layer, shape, most = _layer(case), tuple(_tokens(case).shape), 2 * case.tokens
    if isinstance(layer, RecurrentMixer):

        def step(state: Tensor) -> Tensor:
            # Contribution of the tokens, then hidden and cell state; the input is not passed on.
            return torch.cat([torch.zeros_like(state[:1]), layer.advance(state[0], state[1:])])

        hops = hops_to_the_first_token(lambda _: step, shape=(3, *shape), inputs=0, most=most)
    else:
        hops = hops_to_the_first_token(lambda hop: _layer(case, hop), shape=shape, most=most)
    return Record(case=case, path_length=hops)


_MEASURES: Mapping[str, Callable[[Case, float], Record]] = {
    TIME: _time,
    OPERATIONS: _operations,
    PATH: _path,
}


def _tokens(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.batch, case.tokens, case.model_dim)
    return torch.randn(shape, generator=generator).to(getattr(torch, case.dtype))


def _layer(case: Case, hop: int = 0) -> nn.Module:
    """The layer of a case, the `hop`-th of a stack: x [batch tokens model_dim] to the same shape."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        built = _built(case, hop)
    return built.to(dtype=getattr(torch, case.dtype)).eval()


def _built(case: Case, hop: int) -> nn.Module:
    if case.backend == "recurrent":
        return RecurrentMixer(case.model_dim)
    if case.backend == "convolutional":
        return ConvolutionMixer(case.model_dim, **case.options)
    if case.backend == "separable":
        return SeparableConvolutionMixer(case.model_dim, **case.options)
    if case.backend == "dilated":
        # Causal, since the way through centred dilated layers can lead past the end of the sequence.
        dilation = case.options["kernel_size"] ** hop
        return ConvolutionMixer(case.model_dim, dilation=dilation, causal=True, **case.options)
    return SelfAttention(case)
