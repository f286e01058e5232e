"""Makes this folder: `advise` on SmolLM2-135M at 8192 tokens, linear layers in bfloat16, the rest in float32.

The text that chooses is characters 150 000 to 240 000 of the topics of Python 3.11; `types.txt` is the
shipped chapter.

    python results/h100-80gb/advise-smollm2-8192/make.py MODEL types.txt
"""

import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import efficient_attn as ea

HERE = Path(__file__).parent
VOCABULARY = 49152


def half(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer in bfloat16, but for the logits."""
    if layer.out_features == VOCABULARY:
        return F.linear(x, layer.weight, layer.bias)
    return F.linear(x.bfloat16(), layer.weight.bfloat16()).to(x.dtype)


if __name__ == "__main__":
    model, held_out = map(Path, sys.argv[1:])
    nn.Linear.forward = half  # type: ignore[method-assign]
    texts = {
        "python-topics.txt": "\n\n".join(topics.values())[150_000:240_000],
        held_out.name: held_out.read_text(encoding="utf-8"),
    }
    torch.set_num_threads(7)
    ea.advise(str(model), texts=texts, seq_lens=8192, device="cuda", budget_s=390, out=HERE / "again")
