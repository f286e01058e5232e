"""Any feature map on the one linear algorithm."""

from torch import Tensor, nn

from efficient_attn.errors import UnsupportedError
from efficient_attn.modules.features import RandomFeatures
from efficient_attn.ops.denominators import denominators
from efficient_attn.ops.features import MAPS
from efficient_attn.ops.linear import LinearState
from efficient_attn.ops.linear_causal import causal_linear_attention, extend_linear_attention
from efficient_attn.ops.linear_full import full_linear_attention
from efficient_attn.ops.linear_tokens import Tokens
from efficient_attn.problem import AttentionProblem


class LinearAttention(nn.Module):
    """Attention through features: linear in the number of tokens, full or causal."""

    def __init__(self, features: RandomFeatures, problem: AttentionProblem) -> None:
        super().__init__()
        self.features = features
        self._scale, self._causal = problem.factor, problem.causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        attention = causal_linear_attention if self._causal else full_linear_attention
        return attention(self._tokens(q, k, v, key_mask)).out

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None, key_mask: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        return extend_linear_attention(self._tokens(q, k, v, key_mask), state)

    def denominators(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
        if not MAPS[self.features.kind].signed:
            raise UnsupportedError(
                "denominators are of interest for signed features, such as those of 'performer-trig'; "
                "this backend's features are positive, and so is every sum of them."
            )
        return denominators(self._tokens(q, k, k, key_mask), causal=self._causal)

    def redraw(self, seed: int) -> None:
        self.features.redraw(seed)

    def _tokens(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tokens:
        return Tokens(q, k, v, key_mask, self.features.projection, None, self.features.kind, self._scale)
