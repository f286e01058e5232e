"""Training of small models: optimiser, learning-rate schedule and update."""

import math

import torch
from torch import Tensor, nn

# AdamW (Loshchilov and Hutter 2019) with the second beta that language models are commonly trained with.
_BETAS = (0.9, 0.95)
# The longest gradient: a batch that a model gets very wrong moves it no farther than others do.
_LONGEST_GRADIENT = 1.0


def optimiser(model: nn.Module, *, weight_decay: float = 0.1) -> torch.optim.AdamW:
    """AdamW over the parameters of a model; vectors (biases, norms) do not decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": weight_decay},
        {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
    ]
    made = torch.optim.AdamW(groups, lr=1.0, betas=_BETAS)
    for one in parameters:
        # The state that the first step would make: a checkpoint has the same tensors at any time.
        zeros = {name: torch.zeros_like(one) for name in ("exp_avg", "exp_avg_sq")}
        made.state[one] = {"step": torch.tensor(0.0), **zeros}
    return made


def rate_at(step: int, *, peak: float, warmup: int) -> float:
    """peak · min(step/warmup, √(warmup/step)), steps from 1 on (Vaswani et al. 2017, eq. 3).

    It does not know when training ends, so that a run may always be taken further.
    """
    return peak * min(step / warmup, math.sqrt(warmup / step))


def update(model: nn.Module, optimiser: torch.optim.Optimizer, loss: Tensor, *, rate: float) -> bool:
    """One step of the optimiser at this rate, down the gradient of the loss; whether it was made.

    A gradient that is not finite changes nothing.
    """
    optimiser.zero_grad()
    loss.backward()
    length = nn.utils.clip_grad_norm_(model.parameters(), _LONGEST_GRADIENT)
    if not length.isfinite():
        return False
    for group in optimiser.param_groups:
        group["lr"] = rate
    optimiser.step()
    return True
