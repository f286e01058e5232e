"""Check that all ranks call a backend alike, before collectives of other shapes end the process or hang."""

from hashlib import sha256
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from efficient_attn.errors import ShapeError, UnsupportedError
from efficient_attn.ops.sharded.exchange import gathered
from efficient_attn.ops.sharded.layout import Layout

# Longest description that is compared; a message shows no more of it.
_BYTES = 1024
# Calls of each backend that agreed on a device other than the CPU, where a comparison synchronises with the
# host.
_AGREED: WeakKeyDictionary[nn.Module, set[tuple[str, Layout]]] = WeakKeyDictionary()
# Tensors of each backend with their versions, and the digest of their values.
_DIGESTS: WeakKeyDictionary[nn.Module, tuple[list[ref[Tensor]], list[int | None], str]] = WeakKeyDictionary()
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# 2⁶³ over the golden ratio: products with it spread over all bits.
_ODD = 0x4F1BBCDCBFA53E0B


def check_agreement(call: str, backend: nn.Module, layout: Layout, device: torch.device) -> None:
    """Refuse calls and backends that differ between ranks, on all ranks alike.

    On the CPU every call is compared; on other devices, the first of each backend with its description.

    Raises:
        ShapeError: If the description of this call differs from that of another rank.
        UnsupportedError: If parameters or buffers of the backend do.
    """
    agreed = _AGREED.setdefault(backend, set())
    if (call, layout) in agreed:
        return
    digest = sha256(f"{call} {state_digest(backend)}".encode()).digest()
    digests = gathered(_bytes(digest, 32, device), layout)
    differs = (digests != digests[:1]).any(dim=1)
    if bool(differs.any()):
        calls = [_text(row) for row in gathered(_bytes(call.encode(), _BYTES, device), layout)]
        rank = int(differs.nonzero()[0])
        if calls[rank] == calls[0]:
            raise UnsupportedError(
                f"Rank {rank} of the mesh has other parameters, random features or calibration than rank 0 in"
                f" {calls[0]}: build, redraw and calibrate alike on all ranks, or load one state dict."
            )
        raise ShapeError(
            f"Rank {rank} of the mesh calls {calls[rank]}, and rank 0 calls {calls[0]}; all ranks call "
            "alike: pad the sequence to equally many tokens on each and mask the padding."
        )
    if device.type != "cpu":
        agreed.add((call, layout))


def state_digest(backend: nn.Module) -> str:
    """Digest of all parameters and buffers, computed again only after a change."""
    named = {**dict(backend.named_parameters()), **dict(backend.named_buffers())}
    # The local part of a distributed parameter differs between ranks.
    tensors = {name: x for name, x in named.items() if not (x.is_meta or hasattr(x, "placements"))}
    # Tensors of inference mode have no version.
    versions = [None if x.is_inference() else x._version for x in tensors.values()]
    references, before, digest = _DIGESTS.get(backend, ([], None, ""))
    same = None not in versions and versions == before
    if not same or any(x() is not y for x, y in zip(references, tensors.values(), strict=True)):
        values = [(name, x.dtype, [*x.shape], _checksum(x)) for name, x in tensors.items()]
        digest = sha256(str(values).encode()).hexdigest()
        _DIGESTS[backend] = [ref(x) for x in tensors.values()], versions, digest
    return digest


@torch.no_grad()
def _checksum(x: Tensor) -> int:
    """Sum of the bits of all entries, each times an odd number of its own, modulo 2⁶⁴."""
    real = torch.view_as_real(x) if x.is_complex() else x
    bits = real.contiguous().view(_INTEGERS[real.itemsize]).flatten().long()
    mixed = torch.arange(len(bits), device=x.device) * _ODD
    return int((bits * (mixed ^ mixed >> 29 | 1)).sum())


def _bytes(text: bytes, size: int, device: torch.device) -> Tensor:
    return torch.tensor(list(text[:size].ljust(size)), dtype=torch.uint8, device=device)


def _text(row: Tensor) -> str:
    return bytes(row.tolist()).decode(errors="replace").rstrip()
