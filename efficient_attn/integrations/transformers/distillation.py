"""Layer-wise distillation: exact attention of a model teaches the backends attached to it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.transformers.attachment import swapped
from efficient_attn.integrations.transformers.attend import SUBMODULE
from efficient_attn.integrations.transformers.sites import unwrap
from efficient_attn.ops.dtypes import upcast


class AttentionCall(NamedTuple):
    """One call of an attention layer, computed exactly.

    Attributes:
        backend: Backend attached to the layer, the student.
        q: [batch heads q_tokens head_dim]; k and v accordingly.
        key_mask: [batch k_tokens], true for real tokens; None: all are real.
        out: Exact output, [batch heads q_tokens value_dim].
    """

    backend: Backend
    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    out: Tensor


def distillation_loss(call: AttentionCall) -> Tensor:
    """‖backend − exact‖² / ‖exact‖² of a layer (Zhang et al. 2024, section 4.2).

    The paper compares attention weights, which a backend need not have; this compares outputs.
    """
    out = upcast(call.out.detach())
    student = call.backend(call.q.detach(), call.k.detach(), call.v.detach(), key_mask=call.key_mask)
    return (upcast(student) - out).square().sum() / out.square().sum()


@contextmanager
def exact_calls(model: nn.Module) -> Iterator[list[AttentionCall]]:
    """Collect the attention calls of a model that attends exactly.

    Each call comes with the backend that `attach` gave its layer. The backends are back in place afterwards.

    Raises:
        UnsupportedError: If no backend is attached.
    """
    layers = [module for module in unwrap(model).modules() if hasattr(module, SUBMODULE)]
    students = {layer: getattr(layer, SUBMODULE) for layer in layers}
    if not students:
        raise UnsupportedError("The model has no backends to teach; attach(model, …) adds them.")
    calls: list[AttentionCall] = []
    with swapped(model, "exact"):
        # The teachers are dropped afterwards, and their hooks with them.
        for layer, student in students.items():
            getattr(layer, SUBMODULE).register_forward_hook(_collect(calls, student), with_kwargs=True)
        yield calls


def _collect(calls: list[AttentionCall], student: Backend) -> Callable[..., None]:
    def hook(teacher: Any, tensors: tuple[Tensor, ...], options: dict[str, Any], out: Tensor) -> None:
        q, k, v = tensors
        calls.append(AttentionCall(student, q, k, v, options.get("key_mask"), out))

    return hook
