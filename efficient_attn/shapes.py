"""Tensor types with named axes. They read as documentation and are checked under the tests."""

from jaxtyping import Bool, Float
from torch import Tensor

Queries = Float[Tensor, "batch heads q_tokens head_dim"]
Keys = Float[Tensor, "batch kv_heads k_tokens head_dim"]
Values = Float[Tensor, "batch kv_heads k_tokens value_dim"]
Output = Float[Tensor, "batch heads q_tokens value_dim"]
Weights = Float[Tensor, "batch heads q_tokens k_tokens"]
KeyMask = Bool[Tensor, "batch k_tokens"]

# Queries or keys, wherever a formula treats both alike; the leading axes are its own affair.
Vectors = Float[Tensor, "*batch tokens head_dim"]
# One list of directions for all heads, or one for each head of keys.
Directions = Float[Tensor, "*kv_heads directions head_dim"]
