"""The same weights in torch's own transformer and in ours, so that outputs can be compared."""

import torch
from torch import nn

# Names in torch's layers and in our blocks.
ENCODER = {
    "self_attn": "attention",
    "linear1": "feed_forward.up",
    "linear2": "feed_forward.down",
    "norm1": "attention_residual.norm",
    "norm2": "feed_forward_residual.norm",
    "layers": "blocks",
}
DECODER = {
    **ENCODER,
    "multihead_attn": "cross_attention",
    "norm2": "cross_attention_residual.norm",
    "norm3": "feed_forward_residual.norm",
}


def disturb(module: nn.Module, seed: int) -> None:
    """Noise on all parameters, so that no bias is 0 and no norm is 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def copy_weights(theirs: nn.Module, ours: nn.Module, names: dict[str, str]) -> None:
    """Load torch's parameters into ours; every name of both has to be used."""
    disturb(theirs, seed=0)
    state = {}
    for path, value in theirs.state_dict().items():
        state[".".join(names.get(part, part) for part in path.split("."))] = value
    ours.load_state_dict(state)
