"""Mixins that break one step of a backend without fault, by a function of the tensors of the step.

A function is called with what its arguments name: the backend as `core`, the tensors of the step, or, by any
other name, the tensor that it changes.
"""

from collections.abc import Callable
from typing import Any

import torch
from base_cores import with_gradient
from torch import Tensor, nn

STEPS = {
    "forward": ("q", "k", "v", "mask"),
    "extend": ("q", "k", "v", "state", "mask"),
    "for_every_head": ("x", "heads"),
    "hidden": ("x", "mask"),
    "visible": ("q", "k", "mask"),
    "scores": ("q", "k"),
    "weights": ("logits", "visible"),
}


def replaced(step: str, change: Callable[..., Any]) -> type:
    """A mixin with another step: `change` takes the backend, the step without fault, and its tensors."""

    def method(core, *tensors):
        return change(core, lambda *x: getattr(super(mixin, core), step)(*x), *tensors)

    mixin = type("Fault", (), {step: method})
    return mixin


def _called(function: Callable[..., Any], x: Any, named: dict[str, Any]) -> Any:
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code else ("x",)
    return function(*(named.get(name, x) for name in names))


def before(step: str, name: str) -> Callable[..., type]:
    """Faults that change one tensor of a step, wherever a condition holds."""

    def form(change: Callable[..., Any], *, where: Callable[..., Any] = lambda: True) -> type:
        def method(core, step_without_fault, *tensors):
            named = dict(zip(STEPS[step], tensors, strict=True))
            x, there = named[name], {**named, "core": core}
            if x is not None and _called(where, x, there):
                named[name] = _called(change, x, there)
            return step_without_fault(*named.values())

        return replaced(step, method)

    return form


def after(step: str) -> Callable[..., type]:
    """Faults that change the result of a step."""

    def form(change: Callable[..., Any]) -> type:
        def method(core, step_without_fault, *tensors):
            named = dict(zip(STEPS[step], tensors, strict=True))
            return _called(change, step_without_fault(*tensors), {**named, "core": core})

        return replaced(step, method)

    return form


queries, keys, values, masks = (before("forward", name) for name in STEPS["forward"])


new_queries, new_keys, new_values, earlier_states, new_masks = (
    before("extend", name) for name in STEPS["extend"]
)


output, scores, weights, visible = (after(step) for step in ("forward", "scores", "weights", "visible"))


def flowing(change: Callable[[Tensor], Tensor]) -> type:
    """Another gradient of the output."""
    return output(lambda x: with_gradient(x, change))


def scaled(factor: Callable[..., Any]) -> type:
    """Queries times a factor."""
    return before("scores", "q")(lambda q, k, core: q * _called(factor, None, {"q": q, "k": k, "core": core}))


def action(act: Callable[..., Any]) -> type:
    """A side effect before each call."""

    def change(q, k, v, mask, core):
        _called(act, None, {"q": q, "k": k, "v": v, "mask": mask, "core": core})
        return q

    return queries(change)


def unmasked(where: Callable[..., Any]) -> type:
    """Key masks without effect on the weights, where a condition holds."""
    return before("visible", "mask")(lambda x: None, where=where)


def groups_in_turn(where: Callable[..., Any]) -> type:
    """Grouped queries meet the heads of another group, where a condition holds for x and heads."""

    def for_every_head(core, for_every_head, x, heads):
        if _called(where, x, {"x": x, "heads": heads}):
            return x.repeat(1, heads // x.shape[1], 1, 1)
        return for_every_head(x, heads)

    return replaced("for_every_head", for_every_head)


def first_keys(number: Callable[..., int]) -> type:
    """No more keys are read than a number, of the queries and of how many keys there are."""
    return visible(
        lambda x, q, k: x & (torch.arange(k.shape[2]) < _called(number, None, {"q": q, "keys": k.shape[2]}))
    )


def causal_reads(reads: Callable[[Tensor, Tensor, int], Tensor]) -> type:
    """Where causal, fewer keys are read, by row, key, and keys before the first row."""

    def change(x, q, k, core):
        rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        return x & reads(rows, columns, k.shape[2] - q.shape[2]) if core.problem.causal else x

    return visible(change)


def causal_leak(first: int, step: int) -> type:
    """Some rows of long causal sequences read the next key."""

    def change(x, q, k, core):
        if core.problem.causal and q.shape[2] == k.shape[2] > first:
            rows = torch.arange(first, q.shape[2] - 1, step)
            x = x.clone()
            x[..., rows, rows + 1] = True
        return x

    return visible(change)


def states(change: Callable[..., tuple[Tensor, ...]]) -> type:
    """Another state after `extend`, of its keys, values and mask."""

    def extend(core, extend, *tensors):
        out, state = extend(*tensors)
        return out, change(*state)

    return replaced("extend", extend)


def ring(most: int) -> type:
    return states(lambda k, v, mask: (k[:, :, -most:], v[:, :, -most:], mask[:, -most:]))


def remembered(step: str, name: str, key: Callable[[Tensor], Any]) -> type:
    """A tensor is copied once for each key, and the copy is read ever after."""

    def change(x, core):
        copies = core.__dict__.setdefault("copies", {})
        copied = copies.setdefault(key(x), (x, x.detach().clone()))[1]
        return x + (copied - x.detach()) if x.is_floating_point() else copied

    return before(step, name)(change)


def narrowed(of: torch.dtype, to: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Tensors of a dtype are rounded to another."""
    return lambda x: x.to(to).to(x) if x.dtype == of else x


def default_ratio(core: nn.Module) -> float:
    """The default scale over the scale; 1 at the default."""
    return core.problem.head_dim**-0.5 / core.problem.scale if core.problem.scale else 1.0


F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
