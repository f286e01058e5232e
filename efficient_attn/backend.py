"""Built backends: modules that check their inputs and compute attention."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_attn import sharding
from efficient_attn.errors import DataError, DtypeError, ShapeError, UnknownNameError, UnsupportedError
from efficient_attn.ops.dtypes import without_autocast, without_inference_mode, zero_masked
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import BackendSpec

_AXES = {
    "q": "[batch, heads, tokens, head_dim]",
    "k": "[batch, kv_heads, tokens, head_dim]",
    "v": "[batch, kv_heads, tokens, value_dim]",
}
# Hint for axes in the order of other libraries.
_TRANSPOSED = " If it is [batch, tokens, heads, dim], give x.transpose(1, 2)."

# Function that PyTorch's context_parallel replaces while it is active.
_SDPA = torch._C._nn.scaled_dot_product_attention

_NO_KERNEL = "has no features that estimate the softmax kernel; 'performer-positive' has"


class Backend(nn.Module):
    """Module that maps queries, keys and values to the output of attention.

    Attributes:
        spec: Name, capabilities and options of the attention.
        core: Module that computes the output from unchecked (q, k, v, key_mask).
    """

    def __init__(self, core: nn.Module, spec: BackendSpec, problem: AttentionProblem, options: Any) -> None:
        super().__init__()
        # Further methods of a core are optional.
        self.core: Any = core
        self.spec, self.problem, self.options = spec, problem, options

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, **unknown: Any
    ) -> Tensor:
        """The output [batch heads q_tokens value_dim], in q's dtype.

        Args:
            q: [batch heads q_tokens head_dim]; causal queries are the last positions of the keys.
            k: [batch kv_heads k_tokens head_dim]; kv_heads divides heads.
            v: [batch kv_heads k_tokens value_dim].
            key_mask: bool [batch k_tokens], True for a real token.
            unknown: Arguments of other libraries, refused with their names in this package.

        Raises:
            ShapeError: If shapes or devices differ from each other or from the problem.
            DtypeError: If a dtype is unsupported or differs from q's.
            UnsupportedError: If the inputs need a capability that the backend does not declare.
        """
        if unknown:
            raise UnknownNameError("argument of a backend", next(iter(unknown)), ["q", "k", "v", "key_mask"])
        if sharding.hook is not None:
            return sharding.hook.forward(self, q, k, v, key_mask)
        check_inputs(self, q, k, v, key_mask)
        if q.numel() == 0 or k.shape[2] == 0 or v.shape[-1] == 0:
            return no_keys_output(q, k, v)
        with without_autocast(q):
            return self.core(q, k, v, key_mask)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Output of new tokens that follow `state`, and the new state.

        Prefill is a call with state None, a decoding step a call with one token; `key_mask`
        covers the new tokens. States are never modified, so a state may be extended twice. Inside
        `context_parallel`, a prefill returns the output of this process's tokens and the state after the
        tokens of all processes.

        Raises:
            UnsupportedError: If the backend was not built causal or has no incremental decoding.
        """
        if not self.problem.causal:
            raise UnsupportedError("extend needs a causal backend: build it with causal=True.")
        if not self.spec.capabilities.streaming:
            raise UnsupportedError(f"Backend {self.spec.name!r} keeps no state and cannot extend.")
        if sharding.hook is not None and state is None:
            return sharding.hook.prefill(self, q, k, v, key_mask)
        self._check(q, k, v, key_mask, streaming=True)
        with without_autocast(q):
            return self.core.extend(q, k, v, state, key_mask)

    def attention_weights(
        self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None, rows: Any = None
    ) -> Tensor:
        """Attention weights implied by the backend, [batch heads rows k_tokens], in float32 or better.

        Weight (i, j) is the coefficient of value j in output i, computed as the output for unit vectors as
        values. Memory is k_tokens² per head, even for a linear backend.

        Args:
            rows: Index of q's tokens (a slice or a list); None: all.
        """
        self._check(q, k, k, key_mask)
        wide = torch.promote_types(q.dtype, torch.float32)
        unit = torch.eye(k.shape[2], dtype=wide, device=k.device)
        unit = unit.expand(*k.shape[:2], *unit.shape)
        weights = self(q.to(wide), k.to(wide), unit, key_mask=key_mask)
        return weights if rows is None else weights[:, :, rows]

    def denominators(self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Row sums of signed features over the largest visible scale, [batch heads q_tokens].

        A row with a denominator of 0 or below is no average; `(backend.denominators(q, k) <= 0).sum()`
        counts these rows.

        Raises:
            UnsupportedError: If the backend has no signed features.
        """
        self._require("denominators", "has no random features; 'performer-trig' has denominators")
        self._check(q, k, k, key_mask)
        with without_autocast(q):
            return self.core.denominators(q, k, key_mask)

    @torch.no_grad()
    def keys_read(self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None, rows: Any = None) -> Tensor:
        """Keys that each query reads one by one, bool [batch heads rows k_tokens].

        Such a key has the weight exp(scale · q·k) of exact attention, up to the common denominator of the
        row. Masked keys, later keys, and keys within the summary of a cluster are not read.

        Args:
            rows: Index of q's tokens (a slice, a list or a tensor); None: all.

        Raises:
            UnsupportedError: If the backend reads no keys one by one.
        """
        exact = self.spec.capabilities.exact
        if not (exact or hasattr(self.core, "keys_read")):
            raise UnsupportedError(
                f"Backend {self.spec.name!r} reads no keys one by one; 'window' and 'window-clusters' do."
            )
        self._check(q, k, k, key_mask)
        index = torch.arange(q.shape[2], device=q.device)
        index, keys = index if rows is None else index[rows], torch.arange(k.shape[2], device=k.device)
        visible = keys <= index[:, None] + len(keys) - (q.shape[2] if self.problem.causal else 0)
        if key_mask is not None:
            visible = visible & key_mask[:, None, None]
        visible = visible.expand(*q.shape[:2], len(index), len(keys))
        if exact or not visible.numel():
            return visible
        with without_autocast(q):
            return self.core.keys_read(q, k, key_mask, index) & visible

    def kernel_ratios(self, q: Tensor, k: Tensor) -> Tensor:
        """φ(q_i)·φ(k_i) over the softmax kernel for query i and key i, [batch heads tokens].

        A backend that shifts its keys returns the ratio up to a factor common to all keys of a query.

        Raises:
            UnsupportedError: If the backend has no features, or features of another kernel.
        """
        self._require("kernel_ratios", _NO_KERNEL)
        self._check(q, k, k, None)
        return self.core.kernel_ratios(q, k)

    def kernel_rows(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled, transformed queries and keys, the arguments of the features."""
        self._require("kernel_rows", _NO_KERNEL)
        self._check(q, k, k, None)
        return self.core.kernel_rows(q, k)

    def _check(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, streaming: bool = False) -> None:
        sharding.check_alone()
        check_inputs(self, q, k, v, mask, streaming=streaming)

    def _require(self, verb: str, lack: str) -> None:
        if not hasattr(self.core, verb):
            raise UnsupportedError(f"Backend {self.spec.name!r} {lack}.")

    def redraw(self, seed: int) -> None:
        """Replace the random features by a new draw. Earlier states become invalid.

        Raises:
            UnsupportedError: If the backend has no random features.
        """
        self._require("redraw", "has no random features; nothing to redraw")
        self.core.redraw(seed)

    @property
    def supports_cross(self) -> bool:
        """Whether keys may come from another sequence. All backends of `by-head` must support it."""
        parts = (part for part in self.modules() if isinstance(part, Backend))
        return all(part.spec.capabilities.cross for part in parts)

    @property
    def needs_calibration(self) -> bool:
        """Whether the backend must be calibrated before its first call."""
        return not getattr(self.core, "calibrated", True)

    def calibrate(
        self, q: Tensor, k: Tensor, v: Tensor | None = None, *, key_mask: Tensor | None = None
    ) -> None:
        """Fit data-dependent parameters to sample queries and keys. Earlier states become invalid.

        Buffers hold the parameters, which are saved with the model and used until the next call. For causal
        use, calibrate on other sequences than the inputs, so that no later token leaks into an output. Omit
        padded queries; `key_mask` excludes padded keys.

        Raises:
            UnsupportedError: If the backend has no data-dependent parameters.
            DataError: If q, or an unmasked key or value, is not finite.
            ShapeError: If there is no query or no unmasked key.
        """
        self._require("calibrate", "has nothing to calibrate")
        self._check(q, k, k if v is None else v, key_mask)
        keys = k.shape[0] * k.shape[2] if key_mask is None else int(key_mask.sum())
        if not q.numel() or not keys:
            raise ShapeError(
                f"calibrate needs a query and a key that is not masked; q has shape {list(q.shape)}, k "
                f"{list(k.shape)}, and {keys} keys are not masked."
            )
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x is not None and not (x if name == "q" else zero_masked(x, key_mask)).isfinite().all():
                raise DataError(f"{name} holds numbers that are not finite; calibrate on finite ones.")
        with without_autocast(q), without_inference_mode():
            self.core.calibrate(q, k, v, key_mask)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Backend":
        # A copy that was made in inference mode cannot leave it.
        copied = any(x.is_inference() for x in (*self.parameters(), *self.buffers()))
        with nullcontext() if copied else without_inference_mode():
            return super()._apply(fn, recurse)

    def calibrate_first(self, tensors: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Forward pre-hook: calibrate on the arguments of the call that follows."""
        inputs = dict(zip("qkv", tensors, strict=False)) | named
        # If one of them is missing, the call itself raises an error that names it.
        if {"q", "k", "v"} <= inputs.keys():
            self.calibrate(inputs["q"], inputs["k"], inputs["v"], key_mask=inputs.get("key_mask"))

    def extra_repr(self) -> str:
        return f"{self.spec.name!r}, {self.problem}, {self.options}"


def check_inputs(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, streaming: bool = False
) -> None:
    problem, spec = backend.problem, backend.spec
    _check_whole(q=q, k=k, v=v, key_mask=key_mask)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x, q, spec)
    _check_sizes(problem, spec, q, k, v, streaming=streaming)
    if key_mask is not None:
        _check_mask(spec, key_mask, k)
    # While a call is compiled, the operators refuse tensors of several devices.
    if not torch.compiler.is_compiling():
        _check_devices(backend, q)


def _check_whole(**tensors: Any) -> None:
    """Refuse shards of a sequence, held by context_parallel or in a DTensor."""
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


def _check_sizes(
    problem: AttentionProblem, spec: BackendSpec, q: Tensor, k: Tensor, v: Tensor, *, streaming: bool
) -> None:
    heads, kv_heads, queries, keys = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
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


def _check_devices(backend: Backend, q: Tensor) -> None:
    """Refuse a backend whose parameters or buffers are not on the device of the queries."""
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


def no_keys_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Zeros of the output's shape, with zero gradients of q, k and v."""
    zero = sum(x[..., :0].sum() for x in (q, k, v))
    return q.new_zeros(*q.shape[:-1], v.shape[-1]) + zero


def calibrate(model: nn.Module, *inputs: Any, **named: Any) -> None:
    """Calibrate every backend of a model on the q, k and v that reach it in model(*inputs, **named).

    Each backend is calibrated before its first output, so later layers see the calibrated outputs of earlier
    layers. Use representative inputs; nothing else in the model changes, and nothing is recalibrated later.
    A model without such backends stays unchanged.
    """
    backends = [m for m in model.modules() if isinstance(m, Backend) and hasattr(m.core, "calibrate")]
    if not backends:
        return
    with ExitStack() as stack, torch.no_grad():
        for backend in backends:
            stack.enter_context(backend.register_forward_pre_hook(Backend.calibrate_first, with_kwargs=True))
        model(*inputs, **named)
