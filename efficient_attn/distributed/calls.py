"""Calls of backends inside `context_parallel`: agreement of all ranks, then the exchange."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from hashlib import sha256
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from efficient_attn import sharding
from efficient_attn.backend import Backend, check_inputs, no_keys_output
from efficient_attn.distributed.exchange import gathered
from efficient_attn.distributed.keys import attend_clusters, attend_keys, prefill_keys
from efficient_attn.distributed.layout import Layout
from efficient_attn.distributed.neighbours import attend_neighbours, prefill_neighbours
from efficient_attn.distributed.states import attend_states, attend_sums, prefill_states
from efficient_attn.errors import ShapeError, UnsupportedError
from efficient_attn.ops.dtypes import without_autocast
from efficient_attn.registry import SPECS


class Exchange(NamedTuple):
    """Functions of (backend, q, k, v, key_mask, layout), with the tokens of this rank.

    Attributes:
        attend: Returns the output of the queries of this rank.
        prefill: Returns the output and the state after the tokens of all ranks; None: not causal.
    """

    attend: Callable[..., Tensor]
    prefill: Callable[..., tuple[Tensor, Any]] | None = None


# By `Capabilities.sharded`.
EXCHANGES = {
    "states": Exchange(attend_states, prefill_states),
    "sums": Exchange(attend_sums),
    "neighbours": Exchange(attend_neighbours, prefill_neighbours),
    "keys": Exchange(attend_keys, prefill_keys),
    "clusters": Exchange(attend_clusters),
}


class Calls(NamedTuple):
    layout: Layout

    def forward(self, backend: Backend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """`Backend.forward` with the tokens of this rank."""
        if torch.compiler.is_compiling():
            # A graph has no exchange between ranks: it ends before the call, and another begins behind it.
            return torch.compiler.disable(self.forward)(backend, q, k, v, key_mask)
        check_agreeing(backend, q, k, v, key_mask, self.layout)
        check_inputs(backend, q, k, v, key_mask)
        check_segments(backend, q, k, self.layout)
        if q.numel() == 0 or k.shape[2] == 0 or v.shape[-1] == 0:
            return no_keys_output(q, k, v)
        with without_autocast(q):
            return exchange_of(backend).attend(backend, q, k, v, key_mask, self.layout)

    def prefill(
        self, backend: Backend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, Any]:
        """`Backend.extend` without a state, with the tokens of this rank."""
        prefill = exchange_of(backend).prefill
        assert prefill is not None, "only backends that are not causal have no prefill"
        check_agreeing(backend, q, k, v, key_mask, self.layout, call="extend of ")
        check_inputs(backend, q, k, v, key_mask, streaming=True)
        check_segments(backend, q, k, self.layout)
        with without_autocast(q):
            if k.shape[2] == 0:
                return backend.core.extend(q, k, v, None, key_mask)
            return prefill(backend, q, k, v, key_mask, self.layout)


def in_force(layout: Layout) -> AbstractContextManager[None]:
    """Context in which tensors hold the tokens of this rank alone."""
    return sharding.installed(Calls(layout))


def exchange_of(backend: Backend) -> Exchange:
    kind = backend.spec.capabilities.sharded
    if kind is None:
        names = ", ".join(name for name, spec in sorted(SPECS.items()) if spec.capabilities.sharded)
        raise UnsupportedError(
            f"Backend {backend.spec.name!r} cannot read the tokens of other ranks, inside context_parallel: "
            f"{names} can."
        )
    return EXCHANGES[kind]


def check_segments(backend: Backend, q: Tensor, k: Tensor, layout: Layout) -> None:
    """Refuse parts of segments, and causal queries without keys at their positions."""
    for name, x in (("q", q), ("k", k)):
        if x.shape[2] % len(layout.local):
            raise ShapeError(
                f"{name} has {x.shape[2]} tokens on this rank, and layout {layout.kind!r} has "
                f"{len(layout.local)} segments of equal length there: pad the sequence and mask the padding."
            )
    if backend.problem.causal and q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            f"q has {q.shape[2]} tokens and k has {k.shape[2]}: inside context_parallel causal queries and "
            "keys are the same tokens."
        )


# Longest description that is compared; a message shows no more of it.
_BYTES = 1024
# Calls of each backend that agreed on a device other than the CPU, where a comparison synchronises.
_AGREED: WeakKeyDictionary[nn.Module, set[tuple[str, Layout]]] = WeakKeyDictionary()
# Tensors of each backend with their versions, and the digest of their values.
_DIGESTS: WeakKeyDictionary[nn.Module, tuple[list[ref[Tensor]], list[int | None], str]] = WeakKeyDictionary()


def check_agreeing(
    backend: Backend, q: Any, k: Any, v: Any, key_mask: Any, layout: Layout, *, call: str = ""
) -> None:
    """Refuse calls and backends that differ between ranks, on all ranks alike.

    Collectives of other shapes would end the process or hang. On the CPU every call is compared; on other
    devices, the first of each backend with its description.
    """
    exchange_of(backend)
    device = q.device if isinstance(q, Tensor) else torch.get_default_device()
    call += _description(backend, {"q": q, "k": k, "v": v, "key_mask": key_mask}, layout)
    agreed = _AGREED.setdefault(backend, set())
    if (call, layout) in agreed:
        return
    digest = sha256(f"{call} {_state_digest(backend)}".encode()).digest()
    digests = gathered(_bytes(digest, 32, device), layout)
    differs = (digests != digests[:1]).any(dim=1)
    if bool(differs.any()):
        rows = gathered(_bytes(call.encode(), _BYTES, device), layout).tolist()
        calls = [bytes(row).decode(errors="replace").rstrip() for row in rows]
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


def _description(backend: Backend, tensors: dict[str, Any], layout: Layout) -> str:
    """Properties of a call on which ranks have to agree."""
    inputs = ", ".join(f"{name} {_show(x)}" for name, x in tensors.items() if x is not None)
    options = ", ".join(f"{name}={value}" for name, value in vars(backend.options).items())
    causal = "causal" if backend.problem.causal else "full"
    scale = f"scale {backend.problem.factor}"
    return f"{backend.spec.name}({options}), {causal}, {scale}, {layout.kind}, with {inputs}"


def _show(x: Any) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    gradient = " that needs a gradient" if x.requires_grad and torch.is_grad_enabled() else ""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}{gradient}"


def _state_digest(backend: nn.Module) -> str:
    """Digest of all parameters and buffers, computed again only after a change."""
    named = {**dict(backend.named_parameters()), **dict(backend.named_buffers())}
    # The local part of a distributed parameter differs between ranks.
    tensors = {name: x for name, x in named.items() if not (x.is_meta or hasattr(x, "placements"))}
    # Tensors of inference mode have no version.
    versions = [None if x.is_inference() else x._version for x in tensors.values()]
    references, before, digest = _DIGESTS.get(backend, ([], None, ""))
    same = None not in versions and versions == before
    if not same or any(x() is not y for x, y in zip(references, tensors.values(), strict=True)):
        content = sha256(str([(name, x.dtype, [*x.shape]) for name, x in tensors.items()]).encode())
        for x in tensors.values():
            content.update(x.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        digest = content.hexdigest()
        _DIGESTS[backend] = [ref(x) for x in tensors.values()], versions, digest
    return digest


def _bytes(text: bytes, size: int, device: torch.device) -> Tensor:
    return torch.tensor(list(text[:size].ljust(size)), dtype=torch.uint8, device=device)
