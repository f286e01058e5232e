"""Parts of a sequence whose features are held at a time."""

from efficient_attn.ops.linear.inputs import LinearInputs

# Features of the queries held at a time on other devices than the CPU: a bound on memory, not on tokens.
_HELD = 2**25


def parts(length: int, size: int) -> list[slice]:
    """Consecutive parts of a sequence."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def held_tokens(inputs: LinearInputs, numbers: int | None = None) -> int:
    """Tokens with this number of features over all heads, by default as many as are held; at least 1."""
    return max((numbers or _HELD) // max(inputs.q.shape[0] * inputs.q.shape[1] * inputs.num_features, 1), 1)
