"""The same weights in torch's own transformer and in ours, so that outputs can be compared."""

import torch
from torch import nn


def disturb(module: nn.Module, seed: int) -> None:
    """Noise on all parameters, so that no bias is 0 and no norm is 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def copy_weights(theirs: nn.Module, ours: nn.Module) -> None:
    """Load torch's parameters into ours; every name of both has to be used."""
    disturb(theirs, seed=0)
    ours.load_state_dict(theirs.state_dict())
