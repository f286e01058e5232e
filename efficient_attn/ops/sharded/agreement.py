"""Check that all ranks call a backend alike, before collectives of other shapes end the process or hang."""

from hashlib import sha256

import torch
from torch import Tensor

from efficient_attn.errors import ShapeError
from efficient_attn.ops.sharded.exchange import gathered
from efficient_attn.ops.sharded.layout import Layout

# Longest description that is compared; a message shows no more of it.
_BYTES = 1024
# Calls that agreed on a device other than the CPU, where a comparison synchronises with the host.
_AGREED: set[tuple[str, Layout]] = set()


def check_agreement(call: str, layout: Layout, device: torch.device) -> None:
    """Refuse calls that differ between ranks, on all ranks alike.

    On the CPU every call is compared; on other devices, the first with its description.

    Raises:
        ShapeError: If the description of this call differs from that of another rank.
    """
    if (call, layout) in _AGREED:
        return
    digests = gathered(_bytes(sha256(call.encode()).digest(), 32, device), layout)
    differs = (digests != digests[:1]).any(dim=1)
    if bool(differs.any()):
        calls = [_text(row) for row in gathered(_bytes(call.encode(), _BYTES, device), layout)]
        other = int(differs.nonzero()[0])
        raise ShapeError(
            f"Rank {other} of the mesh calls {calls[other]}, and rank 0 calls {calls[0]}; all ranks call "
            "alike: pad the sequence to equally many tokens on each and mask the padding."
        )
    if device.type != "cpu":
        _AGREED.add((call, layout))


def _bytes(text: bytes, size: int, device: torch.device) -> Tensor:
    return torch.tensor(list(text[:size].ljust(size)), dtype=torch.uint8, device=device)


def _text(row: Tensor) -> str:
    return bytes(row.tolist()).decode(errors="replace").rstrip()
