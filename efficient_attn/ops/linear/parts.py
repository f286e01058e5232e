"""Parts of a sequence whose features are held at a time."""

from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.paths import held


def parts(length: int, size: int) -> list[slice]:
    """Consecutive parts of a sequence."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def held_tokens(inputs: LinearInputs, numbers: int | None = None) -> int:
    """Tokens with this number of features over all heads, by default as many as are held; at least 1."""
    features = max(inputs.q.shape[0] * inputs.q.shape[1] * inputs.num_features, 1)
    return held(features) if numbers is None else max(numbers // features, 1)
