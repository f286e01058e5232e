"""The one device of a registered operator's tensors."""

from torch import Tensor

from efficient_attn.errors import ShapeError


def check_one_device(**tensors: Tensor | None) -> None:
    """Refuse tensors of several devices; called by the fake implementation of every registered operator.

    Torch runs the fake implementation of an operator as soon as one argument lies on meta. Its results lie
    where the other arguments do and hold whatever the memory held before.
    """
    (first, given), *rest = ((name, x) for name, x in tensors.items() if x is not None)
    for name, x in rest:
        if x.device != given.device:
            raise ShapeError(
                f"{name} lies on {x.device} and {first} on {given.device}; move one to the other."
            )
