"""Calls of `F.scaled_dot_product_attention`: arguments, call sites, and the mode that receives them."""

import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

from efficient_attn.backend import Backend
from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.masks import ShownKeys, keys_to_last_query, read_mask
from efficient_attn.problem import AttentionProblem

SDPA = F.scaled_dot_product_attention
CROSS = "its queries and keys are of two sequences (cross-attention)"
IN_COMPILED_CODE = "masks are not read in a whole compiled graph: compile without fullgraph=True, or no mask"
_OUTER = "a module inside this one calls attention too"
_UNEVEN = "the runs of its module differ in their number of calls"
RECOMPUTED = (
    "it is called in a checkpoint or autograd.Function inside its module, whose backward pass would attend "
    "exactly (put the checkpoint around the module)"
)
_COMPILED = "it is called in a compiled function (compile the module instead)"
WEIGHTS_ASKED = (
    "its caller asks for the weights (pass need_weights=False, or attach(weights='none') if it drops them)"
)
CALL_SDPA = (
    "a model from transformers needs attn_implementation='sdpa', nn.MultiheadAttention need_weights=False, "
    "and code with its own softmax must call F.scaled_dot_product_attention instead"
)


@dataclass(frozen=True, kw_only=True)
class SdpaCall:
    """Arguments of a call of `F.scaled_dot_product_attention`.

    Attributes:
        attn_mask: Bool, True for a visible key, or a bias of the scores.
        same: Whether `nn.MultiheadAttention` got one tensor as query and key. None: another caller.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    same: bool | None = None

    @classmethod
    def of(cls, args: tuple[Any, ...], options: dict[str, Any]) -> "SdpaCall":
        """The call with these arguments, positional ones in torch's order."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        # The compiler of torch 2.8 ends a zip of unequal lengths with an error, whatever `strict` says.
        return cls(**dict(zip(names[: len(args)], args, strict=True)), **options)

    def exact(self) -> Tensor:
        """Output of torch's own function."""
        return SDPA(
            self.query,
            self.key,
            self.value,
            self.attn_mask,
            self.dropout_p,
            self.is_causal,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
        )

    @property
    def factor(self) -> float:
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [batch heads tokens dim] in autocast's dtype."""
        q, k, v = self.query, self.key, self.value
        if torch.is_autocast_enabled(q.device.type):
            q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
        return q, k, v

    def shown_keys(self) -> ShownKeys | str:
        """Visible keys, or the reason why no backend serves the call."""
        if self.query.is_nested:
            return "its tensors are nested"
        q_tokens, k_tokens = self.query.shape[-2], self.key.shape[-2]
        tensors = (self.query, self.key, self.value)
        if any(x.ndim != 4 or x.shape[0] != tensors[0].shape[0] for x in tensors):
            return "its tensors are not [batch heads tokens dim] with one batch size"
        if self.attn_mask is not None and self.attn_mask.requires_grad:
            return "its mask is learned (it requires a gradient)"
        if self.dropout_p:
            return f"it drops attention weights (dropout_p={self.dropout_p:g})"
        if self.is_causal and q_tokens != k_tokens:
            return f"is_causal aligns {q_tokens} queries with the first of {k_tokens} keys"
        if self.attn_mask is None:
            return ShownKeys(None, causal=self.is_causal)
        if torch.compiler.is_compiling() and not isinstance(self.attn_mask, CausalBias):
            raise UnsupportedError(IN_COMPILED_CODE)
        shown = read_mask(self.attn_mask, batch=self.query.shape[0], q_tokens=q_tokens, k_tokens=k_tokens)
        return shown if isinstance(shown, str) else shown._replace(causal=shown.causal or self.is_causal)

    def problem(self, shown: ShownKeys, max_tokens: int | None) -> AttentionProblem:
        """Problem of calls like this, for at least `max_tokens` tokens."""
        q, k, _ = self.tensors
        return AttentionProblem(
            head_dim=q.shape[-1],
            num_heads=q.shape[1],
            max_tokens=max(k.shape[-2], max_tokens or 0),
            causal=shown.causal,
            # A scale may be a NumPy number or a tensor.
            scale=None if self.scale is None else float(self.scale),
        )

    def served(self, backend: Backend, shown: ShownKeys) -> Tensor:
        """Output of a backend. An UnsupportedError says why it does not fit the call."""
        # The only query of a decoding step sees all keys, causal or not.
        if shown.causal != backend.problem.causal and self.query.shape[-2] != 1:
            if backend.spec.capabilities.exact:
                return self.exact()
            raise UnsupportedError("its causality is not that of its backend")
        if self.factor != backend.problem.factor:
            raise UnsupportedError(
                f"its scale is {self.factor:g}, that of its backend {backend.problem.factor:g}"
            )
        # Causal queries have positions among the keys.
        if self.crosses and not backend.problem.causal and not backend.supports_cross:
            raise UnsupportedError(CROSS)
        (q, k, v), key_mask = self.tensors, shown.key_mask
        if shown.ends is not None and backend.problem.causal:
            k, v, key_mask = keys_to_last_query(k, v, key_mask, shown.ends)
        return backend(q, k, v, key_mask=key_mask)

    @property
    def crosses(self) -> bool:
        """Whether queries and keys are of two sequences, unless they are causal."""
        return self.same is False or self.query.shape[-2] != self.key.shape[-2]


class Site(NamedTuple):
    """Call site of attention in a model.

    Attributes:
        module: Name of the module whose forward calls attention; "" is the model itself.
        number: 0 for the first call in one run of that forward.
    """

    module: str
    number: int

    def __str__(self) -> str:
        name = self.module or "model"
        return f"{name}#{self.number}" if self.number else name


def unsure_modules(calls: Mapping[Site, int]) -> dict[str, str]:
    """{module whose calls have no sure number: reason}.

    The mode of a module around another one that calls attention would see the calls of both.
    """
    counts = Counter(module for module, _ in {(site.module, count) for site, count in calls.items()})
    uneven = [module for module, variants in counts.items() if variants > 1]
    # The model itself has an empty name.
    outer = [
        module
        for module in counts
        if any(inner != module and (not module or inner.startswith(f"{module}.")) for inner in counts)
    ]
    return dict.fromkeys(uneven, _UNEVEN) | dict.fromkeys(outer, _OUTER)


def detour(start: Any) -> str | None:
    """Reason why the mode that a frame, or its code, has entered misses a backward pass or compiled code."""
    if torch.compiler.is_compiling():
        # Compiled code has no frames: an error breaks the graph, and the call runs again outside of it.
        if not torch.is_grad_enabled():
            raise UnsupportedError(RECOMPUTED)
        return None
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and start not in (frame, frame.f_code):
        # Generated code may have no name.
        module = frame.f_globals.get("__name__")
        if module in ("torch.utils.checkpoint", "torch.autograd.function"):
            return RECOMPUTED
        compiler = frame.f_locals.get("self") if module == "torch._dynamo.eval_frame" else None
        if type(compiler).__name__ == "OptimizeContext":
            return _COMPILED
        frame = frame.f_back
    return None


def compiler_stance(stance: str) -> AbstractContextManager[Any]:
    """Context with a stance of the compiler, without an import of the compiler, which takes seconds."""
    return torch.compiler.set_stance(stance) if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context without gradients in which all modules are in evaluation."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


class AttentionMode(TorchFunctionMode):
    """Mode that passes calls of attention to `attend`, also inside `nn.MultiheadAttention`.

    The fused path of torch's layers is off.

    Attributes:
        weights: "exact", or "none" where callers that ask for the attention weights get None.
    """

    weights = "exact"

    def attend(self, call: SdpaCall) -> Tensor:
        """Output of a call, computed outside of the mode."""
        return call.exact()

    def unreached(self, reason: str) -> None:
        """Record attention that does not call `F.scaled_dot_product_attention`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        kinds: Any,
        args: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        options = options or {}
        if func is SDPA:
            return self.attend(SdpaCall.of(args, options))
        if func is F.multi_head_attention_forward:
            # fair-esm passes all arguments by position.
            named = {**dict(zip(_NAMES[: len(args)], args, strict=True)), **options}
            if self.weights == "none":
                named["need_weights"] = False
            elif named.get("need_weights", True):
                self.unreached(WEIGHTS_ASKED)
            with _Again(self, _same_tensor(named["query"], named["key"])):
                return _MULTI_HEAD(**named)
        if torch.compiler.is_compiling() and func is torch.ops.higher_order.tag_activation_checkpoint:
            # A checkpoint in a graph, which turns the mode off for its function.
            return func(partial(_again, self, args[0]), *args[1:], **options)
        # The compiler cannot follow the method, which calls its parent class, inside a mode.
        return (torch.unflatten if func is Tensor.unflatten else func)(*args, **options)


class _Again(TorchFunctionMode):
    """Enter a mode again inside its own call, where torch turns it off."""

    def __init__(self, mode: AttentionMode, same: bool | None = None) -> None:
        super().__init__()
        self._mode, self._same = mode, same

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), options: Any = None) -> Any:
        if func is SDPA:
            return self._mode.attend(SdpaCall.of(args, {**(options or {}), "same": self._same}))
        return self._mode.__torch_function__(func, kinds, args, options)


def _again(mode: AttentionMode, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with _Again(mode):
        return function(*args, **options)


def _same_tensor(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are one, or equal."""
    if x is y or torch.compiler.is_compiling():
        return True
    if x.shape != y.shape:
        return False
    try:
        # With `batch_first`, nn.MultiheadAttention transposes a query that is the key twice.
        return (x.stride() == y.stride() and x.data_ptr() == y.data_ptr()) or torch.equal(x, y)
    except RuntimeError:
        # Tensors inside torch.func.vmap have no address, and exact attention is right for any.
        return False


def _composite(function: Any) -> Callable[..., Any]:
    """A function of torch that is computed under a mode."""
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    code, defaults = function.__code__, function.__defaults__
    return types.FunctionType(code, names, function.__name__, defaults, function.__closure__)


_MULTI_HEAD = _composite(F.multi_head_attention_forward)
_NAMES = tuple(signature(F.multi_head_attention_forward).parameters)


class SiteMode(AttentionMode):
    """A mode that names call sites by the running module.

    A module that runs several times, in a loop, at each step of a diffusion or again for a checkpoint, counts
    anew, so that a site keeps its name.
    """

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__()
        self._model = model
        # torch.compile puts a module into another one.
        self.modules = {
            ".".join(part for part in name.split(".") if part != "_orig_mod"): module
            for name, module in (() if model is None else model.named_modules())
        }
        self._running: list[list[Any]] = [["", 0, None]]

    def __enter__(self) -> Self:
        self._exit = ExitStack()
        # Hooks see no compiled code.
        self._exit.enter_context(compiler_stance("force_eager"))
        for name, module in self.modules.items():
            enter = module.register_forward_pre_hook(partial(self._enter_module, name))
            leave = module.register_forward_hook(self._leave_module, always_call=True)
            self._exit.callback(enter.remove)
            self._exit.callback(leave.remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._exit.close()

    @property
    def outside(self) -> bool:
        """Whether the call is outside the forward of every module of the model."""
        return len(self._running) == 1

    def next_site(self) -> Site:
        """Site of a call that is made now."""
        name, number, _ = self._running[-1]
        self._running[-1][1] += 1
        return Site(name, number)

    def _enter_module(self, name: str, module: nn.Module, args: Any) -> None:
        # The caller of the hook calls the forward too.
        self._running.append([name, 0, sys._getframe(1)])

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
