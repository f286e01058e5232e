"""Train a gated delta rule, exact attention and Performers of equal state on associative recall.

    python docs/examples/gated_delta.py [--steps 1000] [--seeds 3]

`GatedDelta` is a layer, because its gates come from x. It takes the place of a block's `attention`, also in a
language model: `model.stack.blocks[0].attention = GatedDelta(64, 4)`. The task is that of
`efficient-attn recall --causal`. The default takes about a minute of one idle core, `--quick` seconds.
"""

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import efficient_attn as ea

MODEL_DIM, NUM_HEADS = 64, 2
PAIRS, CLASSES, QUERIES, GAP = 64, 16, 16, 16
BATCH, TEST_SEQUENCES, PEAK_RATE = 4, 128, 0.01
# Floats per head: 64 for each of 96 cached tokens, head_dim² for a delta rule, head_dim + 1 for a feature.
STATES = {("exact", 32): 6144, ("gated-delta", 32): 1024, ("performer-positive", 32): 1023}
STATES |= {("performer-positive", 16): 1020, ("performer-positive", 8): 1017}


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, state: Tensor | None, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """Outputs o_t = S_t q_t, [batch heads tokens dim], and the last state.

    S_t = α_t S_{t-1} (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ (Yang et al. 2024, arXiv 2412.06464, section 3.1) is
    α_t S_{t-1} + u_t k_tᵀ with u_t = β_t (v_t - α_t S_{t-1} k_t). In a chunk after state S, with
    γ_t = α_1 … α_t and Γ_ts = γ_t / γ_s, the rows u_t of U solve a triangular system (UT transform, arXiv
    2406.06484): (I + tril(diag(β) (Γ ⊙ K Kᵀ), -1)) U = diag(β) (V - diag(γ) K Sᵀ).

    q, k and v are [batch heads tokens dim] with |k_t| ≤ 1, the gates [batch heads tokens] with a finite
    log α ≤ 0 and 0 ≤ β ≤ 1. The state is Sᵀ, [batch heads dim dim]; None: zeros.
    """
    state = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state
    inputs = q, k, v, log_alpha[..., None], beta[..., None]
    outputs = []
    for q, k, v, log_alpha, beta in zip(*(x.split(chunk, dim=2) for x in inputs), strict=True):
        log_gamma = log_alpha.cumsum(dim=2)
        # Ratios to later tokens are left out before exp, where they would overflow.
        gamma, ratios = log_gamma.exp(), (log_gamma - log_gamma.mT).tril().exp().tril()
        system, right = beta * ratios * (k @ k.mT), beta * (v - gamma * (k @ state))
        u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        outputs.append(gamma * (q @ state) + ratios * (q @ k.mT) @ u)
        state = gamma[:, :, -1:] * state + (ratios[:, :, -1:].mT * k).mT @ u
    return torch.cat(outputs, dim=2), state


class GatedDelta(nn.Module):
    """Causal layer with projections as in `ea.AttentionLayer`, and two gates for each head.

    Queries and keys have norm 1. Convolutions, output norm and output gate of Gated DeltaNet are left out, so
    that blocks differ in nothing else.
    """

    def __init__(self, model_dim: int, num_heads: int, *, head_dim: int | None = None) -> None:
        super().__init__()
        self.num_heads, rows = num_heads, num_heads * (head_dim or model_dim // num_heads)
        self.in_proj_weight = nn.Parameter(torch.empty(3 * rows, model_dim))
        self.gates, self.out_proj = nn.Linear(model_dim, 2 * num_heads), nn.Linear(rows, model_dim)
        nn.init.xavier_uniform_(self.in_proj_weight)
        # Heads begin with α from .95 to .9997, memories of 20 to 3000 tokens, and with β = ½.
        self.gates.bias = nn.Parameter(torch.cat([torch.linspace(3, 8, num_heads), torch.zeros(num_heads)]))

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Map x [batch tokens model_dim] to the same shape. Masked tokens are not written."""
        return self.extend(x, key_mask=key_mask)[0]

    def extend(
        self, x: Tensor, state: Tensor | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output of new tokens that follow `state`, and the new state."""
        heads = F.linear(x, self.in_proj_weight).unflatten(-1, (3 * self.num_heads, -1))
        q, k, v = heads.transpose(1, 2).chunk(3, dim=1)
        alpha, beta = self.gates(x).mT.chunk(2, dim=1)
        log_alpha, beta = F.logsigmoid(alpha), beta.sigmoid()
        if key_mask is not None:
            log_alpha, beta = log_alpha * key_mask[:, None], beta * key_mask[:, None]
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        y, state = gated_delta_rule(q, k, v, log_alpha, beta, state, chunk=32)
        return self.out_proj(y.transpose(1, 2).flatten(2)), state


class Learner(nn.Module):
    """Embeddings of keys and values, one block, and a guess of the value at each query."""

    def __init__(self, method: str, head_dim: int, *, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        options = {"activation": "gelu", "norm": "pre", "feed_forward_dim": MODEL_DIM, "causal": True}
        backend = "exact" if method == "gated-delta" else method
        if backend != "exact":
            options |= {"num_features": STATES[method, head_dim] // (head_dim + 1), "seed": seed}
        self.keys = nn.Embedding(2 * PAIRS + 1, MODEL_DIM // 2)
        self.values = nn.Embedding(CLASSES + 1, MODEL_DIM // 2)
        self.guess = nn.Linear(MODEL_DIM, CLASSES)
        self.block = ea.TransformerBlock(MODEL_DIM, NUM_HEADS, backend, head_dim=head_dim, **options)
        if method == "gated-delta":
            self.block.attention = GatedDelta(MODEL_DIM, NUM_HEADS, head_dim=head_dim)
        # As in `recall`, a query starts nearest to its own key.
        of_queries, of_keys, _ = self.block.attention.in_proj_weight.data.chunk(3)
        of_keys.copy_(of_queries)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        halves = [F.layer_norm(x, x.shape[-1:]) for x in (self.keys(keys), self.values(values))]
        return self.guess(self.block(torch.cat(halves, dim=-1))[:, -QUERIES:])


def sequences(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [batch tokens] of pairs, a gap and queries, and the answers [batch queries]."""
    keys = torch.rand(batch, 2 * PAIRS, generator=generator).argsort(dim=1)[:, :PAIRS]
    values, order = torch.rand(2, batch, PAIRS, generator=generator).argsort(dim=2)
    values, queried = values % CLASSES, order[:, :QUERIES]
    shown = torch.cat([keys, torch.full((batch, GAP), 2 * PAIRS), keys.gather(1, queried)], dim=1)
    return shown, F.pad(values, (0, GAP + QUERIES), value=CLASSES), values.gather(1, queried)


def train(model: Learner, *, steps: int, seed: int) -> float:
    """Accuracy on unseen sequences after training."""
    generator = torch.Generator().manual_seed(seed)
    keys, values, answers = sequences(TEST_SEQUENCES, generator)
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(steps):
        share = (step + 0.5) / steps
        optimiser.param_groups[0]["lr"] = PEAK_RATE * min(10 * share, 1 - share)
        *shown, targets = sequences(BATCH, generator)
        optimiser.zero_grad()
        F.cross_entropy(model(*shown).mT, targets).backward()
        optimiser.step()
    return (model(keys, values).argmax(dim=-1) == answers).float().mean().item()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train each method from each seed, and print accuracies beside states and parameters."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="10 steps of one seed, a test of function.")
    args = parser.parse_args(arguments)
    steps, seeds = (10, 1) if args.quick else (args.steps, args.seeds)
    torch.set_num_threads(1)
    print(f"{'method':20}{'head_dim':>9}{'state':>7}{'parameters':>12}  accuracy (range over seeds)")
    for (method, head_dim), floats in STATES.items():
        models = [Learner(method, head_dim, seed=seed) for seed in range(seeds)]
        parameters = sum(parameter.numel() for parameter in models[0].parameters())
        accuracies = [train(model, steps=steps, seed=seed) for seed, model in enumerate(models)]
        span = f"{sum(accuracies) / seeds:.3f} ({min(accuracies):.3f} to {max(accuracies):.3f})"
        print(f"{method:20}{head_dim:9}{floats:7}{parameters:12}  {span}", flush=True)


if __name__ == "__main__":
    main()
