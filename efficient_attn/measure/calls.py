"""The measured call: attention alone, a block around it, or an encoder of such blocks.

Blocks are post-norm with ReLU, model_dim = num_heads·head_dim and a feed-forward dimension of 4·model_dim, as
in the base model of Vaswani et al. 2017. Embeddings and positions are omitted: they are the same for every
attention. A call is eager, compiled by torch.compile, or decodes the last token.
"""

import copy
import gc
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from efficient_attn.backend import calibrate
from efficient_attn.backends import build, resolve
from efficient_attn.contained import contained, described, one_line
from efficient_attn.errors import AttentionError, UnsupportedError
from efficient_attn.external import AdaptedAttention
from efficient_attn.measure import error, memory
from efficient_attn.measure.memory import Call
from efficient_attn.measure.new_values import Values
from efficient_attn.measure.record import DECODED, SAME_INPUTS, Case, Record, replace
from efficient_attn.measure.variants import CEILING, UNIFORM_ATTENTION
from efficient_attn.operation_counts import MatMul
from efficient_attn.ops.paths import observed_kernels, only_torch
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import BackendSpec, Capabilities, NoOptions
from efficient_attn.theory.complexity import call_flops
from efficient_attn.transformer.block import TransformerBlock
from efficient_attn.transformer.stack import Encoder

# Messages of torch's allocators; the CPU allocator raises a plain RuntimeError.
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")


class Prepared(NamedTuple):
    """A module on its device, and its measured call: forward, or forward and backward.

    Attributes:
        checked: The call with checks of its results, which raises on an invalid output or gradient.
        inputs: q, k, v [batch heads tokens head_dim], or x [batch tokens model_dim].
        calibrated_on: Calibration inputs of backends that need calibration; None: no backend does.
    """

    module: Any
    call: Call
    checked: Call
    values: Values
    inputs: tuple[Tensor, ...]
    streams: bool
    calibrated_on: str | None


def prepare(case: Case, target: Any) -> Prepared:
    """Build the module of a case around the backend `target`, and draw its Gaussian inputs."""
    # An existing module is copied: moving it to a dtype or device must not change the original.
    target = target if isinstance(target, str) else copy.deepcopy(target)
    spec = BASELINES.get(case.backend) or resolve(target)
    if case.backward and not spec.capabilities.gradients:
        raise UnsupportedError(f"Backend {spec.name!r} has no gradients; measure it without --backward.")
    *sources, gradient = _inputs(case)
    # All backends share the sources, into which a call may write.
    tensors = [source.clone() for source in sources]
    module = _build(case, spec).to(device=case.device, dtype=getattr(torch, case.dtype)).eval()
    calibrated_on = None
    # Calibration on the measured inputs is not part of the measured call.
    if any(backend.needs_calibration for backend in error.backends_in(module)):
        calibrate(module, *tensors)
        calibrated_on = SAME_INPUTS
    streams = case.causal and bool(spec.capabilities.streaming)
    if case.execution == DECODED:
        if not (streams and case.of == "attention"):
            raise UnsupportedError(f"{spec.name!r} keeps no state from which a token could be decoded.")
        call = checked = _decoding(module, tensors)
    else:
        forward = torch.no_grad()(partial(module, *tensors))
        call = _backward(module, tensors, gradient) if case.backward else forward
        checked = partial(_checked, module, call, case)
    values = Values(case, module, call, tensors, sources)
    return Prepared(module, call, checked, values, tuple(tensors), streams, calibrated_on)


def state_bytes(prepared: Prepared) -> int | None:
    """Bytes of the streaming state after all tokens, or None without a state."""
    if not prepared.streams:
        return None
    with torch.no_grad():
        _, state = prepared.module.extend(*prepared.inputs)
    return memory.state_bytes(state)


def _build(case: Case, spec: BackendSpec) -> Any:
    """Build the module with weights drawn from the case's seed. Leaves the global generator unchanged."""
    shared: dict[str, Any] = {"max_tokens": case.tokens, "causal": case.causal, **case.options}
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(case.seed)
        if case.of == "attention":
            return build(spec, head_dim=case.head_dim, num_heads=case.num_heads, **shared)
        shared["feed_forward_dim"] = 4 * case.model_dim
        if case.of == "block":
            return TransformerBlock(case.model_dim, case.num_heads, spec, **shared)
        layers = case.layers or 1
        return Encoder(case.model_dim, case.num_heads, spec, num_layers=layers, positions=None, **shared)


_VALUES = BackendSpec(
    name=CEILING,
    summary="Identity attention: the values themselves.",
    options_type=NoOptions,
    capabilities=Capabilities(causal=True, streaming=False),
    builder=lambda problem, options: AdaptedAttention(lambda q, k, v, causal=False: v, problem),
)


def _mean(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    return error.mean_of_values(q, v, causal=causal, key_mask=key_mask).contiguous()


MEAN = BackendSpec(
    name=UNIFORM_ATTENTION,
    summary="Uniform attention: the mean of the visible values for every query.",
    options_type=NoOptions,
    capabilities=Capabilities(causal=True, streaming=False),
    builder=lambda problem, options: AdaptedAttention(_mean, problem),
    operations=lambda problem, options, tokens, value_dim: (MatMul(tokens * value_dim),),
    rank=lambda problem, options: 1,
)

BASELINES = {CEILING: _VALUES, UNIFORM_ATTENTION: MEAN}


def _backward(module: Any, inputs: list[Tensor], gradient: Tensor) -> Call:
    """A forward pass, then the gradients with respect to inputs and parameters."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    learned = [weight for weight in module.parameters() if weight.requires_grad]

    def call() -> object:
        return torch.autograd.grad(module(*leaves), [*leaves, *learned], gradient, allow_unused=True)

    return call


def _checked(module: Any, call: Call, case: Case) -> object:
    """Make the call; raises on an invalid output, or a missing or non-finite gradient."""
    with error.outputs_checked(module):
        result = call()
    # A backend may have unused parameters; baselines do not read q and k.
    if case.backward and case.backend not in BASELINES:
        names = ("q", "k", "v") if case.of == "attention" else ("x",)
        error.check_gradients(dict(zip(names, result, strict=False)))
    return result


def _inputs(case: Case) -> tuple[Tensor, ...]:
    """Gaussian inputs, then an upstream gradient, of equal shapes apart from the heads of k and v."""
    if case.of == "attention":
        shape = (case.batch, case.num_heads, case.tokens, case.head_dim)
        q, k, v, gradient = _gaussian(4, shape, case.dtype, case.device, case.seed)
        kv_heads = case.num_kv_heads or case.num_heads
        return q, k[:, :kv_heads], v[:, :kv_heads], gradient
    return _gaussian(2, (case.batch, case.tokens, case.model_dim), case.dtype, case.device, case.seed)


# Cached: all backends at a length share the same inputs, alone or in a block.
@lru_cache(maxsize=2)
def _gaussian(count: int, shape: tuple[int, ...], dtype: str, device: str, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(shape, generator=generator) for _ in range(count))
    return tuple(tensor.to(device=device, dtype=getattr(torch, dtype)) for tensor in drawn)


def attention_flops(case: Case, target: Any) -> int | None:
    """Operations of the attention of one layer of the case, or None if the backend does not count them."""
    # External counting code may fail. The measurement of the case records the failure.
    with suppress(Exception), contained():
        spec = resolve(target)
        problem = AttentionProblem(
            head_dim=case.head_dim, num_heads=case.num_heads, max_tokens=case.tokens, causal=case.causal
        )
        return call_flops(
            spec,
            problem,
            spec.options_type(**case.options),
            case.tokens,
            batch=case.batch,
            num_kv_heads=case.num_kv_heads,
            backward=case.backward,
        )
    return None


def _decoding(module: Any, inputs: list[Tensor]) -> Call:
    """Call of the last token after the state of all tokens before it. States are never modified."""
    before, last = ([x[:, :, rows] for x in inputs] for rows in (slice(-1), slice(-1, None)))
    with torch.no_grad():
        _, state = module.extend(*before)

    @torch.no_grad()
    def call() -> object:
        return module.extend(*last, state)[0]

    error.check_call(module, last, {}, call())
    return call


def answer(case: Case, measured: Callable[[], Record]) -> Record:
    """Result of `measured` under the thread count of the case, or a record of its exception."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(case.threads)
        with contained(), observed_kernels() as names:
            record = measured()
        # Fused kernels that ran, or else algorithms for the CPU or PyTorch's operators.
        others = "cpu" if case.device == "cpu" and not only_torch() else "torch"
        return replace(record, kernels=", ".join(sorted(names)) or others)
    except Exception as failure:  # the backend may be external code: any exception is a result
        record = failed(case, failure)
    finally:
        torch.set_num_threads(threads)
    return record


def failed(case: Case, failure: Exception) -> Record:
    """Record of an exception, after the memory that it held is released."""
    if isinstance(failure, AttentionError):
        return Record(case=case, status="unsupported", reason=one_line(str(failure)))
    reason = described(failure)
    exhausted = isinstance(failure, MemoryError) or type(failure).__name__ == "OutOfMemoryError"
    worded = isinstance(failure, RuntimeError) and any(words in reason for words in _OUT_OF_MEMORY)
    gc.collect()
    if case.device.startswith("cuda"):
        # An illegal memory access ends the context of this process, and every later call raises it again.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
    return Record(case=case, status="oom" if exhausted or worded else "error", reason=reason)
