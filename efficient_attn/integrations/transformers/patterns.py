"""Patterns of visible keys, read from the mask functions that transformers composes."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from efficient_attn.errors import UnsupportedError

# Mask functions whose keys are no range around the query, and their description.
_OTHERS = {
    "packed_sequence_mask_function": "several sequences packed into one row",
    "remap_positions_for_packed_sequence": "several sequences packed into one row",
    "chunked_overlay": "keys in chunks",
    "blockwise_overlay": "keys in bidirectional blocks",
    "or_masks": "a union of mask patterns",
}


class Pattern(NamedTuple):
    """Keys i−back … i+ahead are visible to position i; None: unlimited on that side.

    Attributes:
        other: Description of a pattern that is no such range; None: it is one.
    """

    back: int | None
    ahead: int | None
    other: str | None = None

    @property
    def causal(self) -> bool:
        return self.ahead == 0

    @property
    def sliding(self) -> bool:
        return self.back is not None

    @property
    def window(self) -> int | None:
        """Width as in the option of the `window` backend; None without a window."""
        if self.back is None or self.ahead is None:
            return None
        return self.back + self.ahead + 1

    def __str__(self) -> str:
        if self.other is not None:
            return self.other
        kind = "causal" if self.causal else "bidirectional"
        return f"{kind} over {self.window} keys" if self.sliding else f"{kind} over all keys"


FULL, CAUSAL = Pattern(None, None), Pattern(None, 0)


def read_pattern(mask_function: Callable) -> Pattern:
    """The pattern of one of transformers' mask functions."""
    back = ahead = None
    for part in _parts(mask_function):
        name = _name(part)
        if part is causal_mask_function:
            ahead = 0
        elif name == "sliding_window_overlay":
            back = _enclosed(part, "sliding_window") - 1
        elif name == "sliding_window_bidirectional_overlay":
            back = ahead = _enclosed(part, "sliding_window")
        elif part is not bidirectional_mask_function:
            return Pattern(None, None, _OTHERS.get(name, f"keys by the pattern {name!r}"))
    return Pattern(back, ahead)


def pattern_compiled(mask_function: Callable, width: int | None, bidirectional: bool) -> Pattern:
    """As `read_pattern`, in code that is compiled, where closures are not read.

    Args:
        width: Width of a window, from the other arguments of a mask function; None: no window is certain.
    """
    if mask_function is causal_mask_function:
        return CAUSAL
    if mask_function is bidirectional_mask_function:
        return FULL
    # The compiler of torch 2.8 reads no `__qualname__` of an inner function, but puts it into `__name__`.
    if width is not None and mask_function.__name__.endswith("and_mask"):
        return Pattern(width, width) if bidirectional else Pattern(width - 1, 0)
    return Pattern(
        None, None, "a mask that compiled code does not name (without packed sequences, pass attention_mask)"
    )


def _parts(mask_function: Callable) -> Iterator[Callable]:
    """The mask functions whose intersection this mask function is."""
    if _name(mask_function) != "and_masks":
        yield mask_function
        return
    for part in _enclosed(mask_function, "mask_functions"):
        yield from _parts(part)


def _name(function: Callable) -> str:
    """Name of the function, or of the transformers function that created it."""
    return getattr(function, "__qualname__", repr(function)).partition(".<locals>")[0]


def _enclosed(function: Any, name: str) -> Any:
    """The value of a closure variable of a function."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if name not in cells:
        raise UnsupportedError(
            f"This version of transformers builds the mask {_name(function)!r} in a way that efficient_attn "
            "does not know; use attn_implementation='sdpa'."
        )
    return cells[name].cell_contents
