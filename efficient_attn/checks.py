"""Checks of the inputs of backends: shapes, dtypes, devices, capabilities."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from efficient_attn.errors import DataError, DtypeError, ShapeError, UnsupportedError
from efficient_attn.ops.dtypes import zero_masked
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import BackendSpec

if TYPE_CHECKING:
    from efficient_attn.backend import Backend

_AXES = {
    "q": "[batch, heads, tokens, head_dim]",
    "k": "[batch, kv_heads, tokens, head_dim]",
    "v": "[batch, kv_heads, tokens, value_dim]",
}
# Hint for axes in the order of other libraries.
_TRANSPOSED = " If it is [batch, tokens, heads, dim], give x.transpose(1, 2)."

# Function that PyTorch's context_parallel replaces while it is active.
_SDPA = torch._C._nn.scaled_dot_product_attention


def check_inputs(
    backend: "Backend", q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, streaming: bool = False
) -> None:
    """Refuse inputs that the backend cannot compute.

    Raises:
        ShapeError, DtypeError, UnsupportedError: If a shape, dtype, device or capability does not fit.
    """
    problem, spec = backend.problem, backend.spec
    check_whole(q=q, k=k, v=v, key_mask=key_mask)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x, q, spec)
    _check_heads(problem, q, k, v)
    _check_tokens(problem, spec, q, k, v, streaming=streaming)
    if key_mask is not None:
        _check_mask(spec, key_mask, k)
    if not torch.compiler.is_compiling():
        _check_devices(backend, q)
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            raise UnsupportedError(
                "Backends take no transforms of torch.func (vmap, grad, jvp) and no forward-mode "
                "derivatives: use torch.autograd.grad."
            )


def check_whole(**tensors: Any) -> None:
    """Refuse shards of a sequence that is distributed over processes.

    Raises:
        UnsupportedError: If torch's context_parallel is active, or a DTensor is not replicated.
    """
    sdpa = F.scaled_dot_product_attention
    # Other packages replace the function by a faster kernel for the same tensors.
    if sdpa is not _SDPA and str(sdpa.__module__).startswith("torch.distributed."):
        raise UnsupportedError(
            "Inside torch's context_parallel a backend would attend to the tokens of its own process alone; "
            "leave context_parallel, or call torch.nn.functional.scaled_dot_product_attention itself."
        )
    for name, x in tensors.items():
        # A DTensor is a subclass.
        if type(x) is Tensor or x is None:
            continue
        if not all(placement.is_replicate() for placement in getattr(x, "placements", ())):
            raise UnsupportedError(
                f"{name} is a DTensor with placements {tuple(x.placements)}, and a backend would attend to "
                f"the part of its own process alone; give {name}.full_tensor()."
            )


def _check_tensor(name: str, x: Any, q: Tensor, spec: BackendSpec) -> None:
    if not isinstance(x, Tensor):
        raise DtypeError(f"{name} is a torch tensor {_AXES[name]}, not {type(x).__name__}.")
    if x.ndim != 4:
        raise ShapeError(f"{name} has shape {list(x.shape)}; wanted are 4 axes {_AXES[name]}.")
    if not x.is_floating_point() or str(x.dtype).removeprefix("torch.") not in spec.capabilities.dtypes:
        dtypes = ", ".join(spec.capabilities.dtypes)
        raise DtypeError(f"{name} is {x.dtype}; backend {spec.name!r} computes in {dtypes}.")
    if x.dtype != q.dtype:
        raise DtypeError(f"{name} is {x.dtype} and q is {q.dtype}; convert one to the other's dtype.")
    if x.device != q.device:
        raise ShapeError(f"{name} lies on {x.device} and q on {q.device}; move one to the other.")
    if x.shape[0] != q.shape[0]:
        raise ShapeError(f"{name} has a batch of {x.shape[0]} and q one of {q.shape[0]}; they are equal.")


def _check_heads(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> None:
    heads, kv_heads = q.shape[1], k.shape[1]
    for name, x in (("q", q), ("k", k)):
        if x.shape[-1] != problem.head_dim:
            raise ShapeError(
                f"{name} has {x.shape[-1]} entries a vector, shape {list(x.shape)}; this backend was built "
                f"with head_dim={problem.head_dim}."
            )
    if problem.num_heads is not None and heads != problem.num_heads:
        raise ShapeError(
            f"q has {heads} heads, shape {list(q.shape)}; this backend was built with "
            f"num_heads={problem.num_heads}.{_TRANSPOSED if q.shape[2] == problem.num_heads else ''}"
        )
    if v.shape[1] != kv_heads:
        raise ShapeError(f"v has {v.shape[1]} heads and k has {kv_heads}; they are equal.")
    if kv_heads == 0 or heads % kv_heads:
        raise ShapeError(
            f"q has {heads} heads and k has {kv_heads}; the heads of k divide the heads of q.{_TRANSPOSED}"
        )


def _check_tokens(
    problem: AttentionProblem, spec: BackendSpec, q: Tensor, k: Tensor, v: Tensor, *, streaming: bool
) -> None:
    queries, keys = q.shape[2], k.shape[2]
    if v.shape[2] != keys:
        raise ShapeError(f"v has {v.shape[2]} tokens and k has {keys}; they are equal.")
    if streaming and queries != keys:
        raise ShapeError(f"extend takes as many queries as keys; q has {queries} tokens and k has {keys}.")
    if problem.causal and queries > keys:
        raise ShapeError(
            f"q has {queries} tokens and k has {keys}; causal queries are the last positions of the keys, "
            "so there are no more of them than keys."
        )
    if not problem.causal and queries != keys and not spec.capabilities.cross:
        raise UnsupportedError(
            f"Backend {spec.name!r} needs as many queries as keys where it is not causal; "
            f"q has {queries} tokens and k has {keys}."
        )
    if spec.capabilities.needs_all_queries and queries != keys:
        raise UnsupportedError(
            f"Backend {spec.name!r} chooses keys by earlier queries and needs as many queries as keys; q has "
            f"{queries} tokens and k has {keys}. `extend`, and `StateCache` in a model, keep what it needs."
        )
    if spec.capabilities.needs_max_tokens and problem.max_tokens is not None and keys > problem.max_tokens:
        raise ShapeError(
            f"This {spec.name!r} was built for at most {problem.max_tokens} tokens and k has {keys}. "
            f"Build it with max_tokens={keys} or more."
        )


def _check_mask(spec: BackendSpec, key_mask: Any, k: Tensor) -> None:
    form = f"key_mask is bool [batch, k_tokens] = {[k.shape[0], k.shape[2]]}, True for a real token"
    if not spec.capabilities.key_mask:
        raise UnsupportedError(f"Backend {spec.name!r} takes no key_mask.")
    if not isinstance(key_mask, Tensor):
        raise DtypeError(f"{form}; it is {type(key_mask).__name__}.")
    if key_mask.is_floating_point():
        raise DtypeError(f"{form}; it is {key_mask.dtype}. A mask of 0 and -inf becomes (mask == 0).")
    if key_mask.dtype != torch.bool:
        raise DtypeError(f"{form}; it is {key_mask.dtype}. Give key_mask.bool().")
    if key_mask.shape != (k.shape[0], k.shape[2]):
        pattern = " A pattern of query and key is no key mask: choose a backend that has it."
        hint = pattern if key_mask.ndim > 2 else ""
        raise ShapeError(f"{form}; it has shape {list(key_mask.shape)}.{hint}")
    if key_mask.device != k.device:
        raise ShapeError(f"key_mask lies on {key_mask.device} and k on {k.device}; move it there.")


def _check_devices(backend: "Backend", q: Tensor) -> None:
    """Refuse parameters and buffers of a backend on another device than the queries."""
    for path, module in backend.named_modules():
        # Accelerate's hook moves the tensors of its module when the module is called.
        if "_hf_hook" in module.__dict__:
            continue
        for name, x in (*module._parameters.items(), *module._buffers.items()):
            if x is not None and x.device != q.device:
                remedy = "load it, or build the backend again" if x.is_meta else "move one to the other"
                raise ShapeError(
                    f"{path}.{name} of backend {backend.spec.name!r} is on {x.device} and q on {q.device}; "
                    f"{remedy}."
                )


def check_sample(q: Tensor, k: Tensor, v: Tensor | None, key_mask: Tensor | None) -> None:
    """Refuse calibration inputs without a query or key, and unmasked ones that are not finite."""
    keys = k.shape[0] * k.shape[2] if key_mask is None else int(key_mask.sum())
    if not q.numel() or not keys:
        raise ShapeError(
            f"calibrate needs a query and a key that is not masked; q has shape {list(q.shape)}, k "
            f"{list(k.shape)}, and {keys} keys are not masked."
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None and not (x if name == "q" else zero_masked(x, key_mask)).isfinite().all():
            raise DataError(f"{name} holds numbers that are not finite; calibrate on finite ones.")
