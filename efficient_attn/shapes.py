"""Tensor types with named axes. Tests check them at run time."""

from jaxtyping import Bool, Float
from torch import Tensor

Queries = Float[Tensor, "batch heads q_tokens head_dim"]
Keys = Float[Tensor, "batch kv_heads k_tokens head_dim"]
Values = Float[Tensor, "batch kv_heads k_tokens value_dim"]
Output = Float[Tensor, "batch heads q_tokens value_dim"]
Weights = Float[Tensor, "batch heads q_tokens k_tokens"]
KeyMask = Bool[Tensor, "batch k_tokens"]

# Queries or keys in formulas that treat both alike, with any leading axes.
Vectors = Float[Tensor, "*batch tokens head_dim"]
# Directions of all heads, or of each key head.
Directions = Float[Tensor, "*kv_heads directions head_dim"]
