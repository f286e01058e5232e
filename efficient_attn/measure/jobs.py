"""Requests to a child process; each may run external code."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

from efficient_attn.contained import contained, described
from efficient_attn.errors import AttentionError
from efficient_attn.measure import worker
from efficient_attn.measure.records import Case, line

# Size of a trial call.
_TOKENS, _HEADS, _HEAD_DIM = 16, 2, 8


def answer(request: Mapping[str, Any]) -> str:
    """The answer to a request, as one line."""
    jobs = {"measure": _measure, "load": _load, "check": _check}
    return jobs[request["job"]](request)


def _measure(request: Mapping[str, Any]) -> str:
    case = Case(**request["case"])
    return line(worker.measure(case, **{name: request[name] for name in ("target", "seconds", "inputs")}))


def _load(request: Mapping[str, Any]) -> str:
    """Error message if the backend does not exist, else None; exceptions of a trial call do not count."""
    try:
        spec = _resolved(request["target"])
    except AttentionError as error:
        return json.dumps(str(error))
    if request["rehearse"]:
        _rehearse(spec)
    return json.dumps(None)


def _check(request: Mapping[str, Any]) -> str:
    """Run one check of a backend; returns the fields of its record."""
    from efficient_attn.testing import adapt, check_backend

    target, name, declared = request["target"], request["check"], request["declared"]
    spec = _resolved(target) if declared is None else adapt(target, **declared)
    (record,) = check_backend(
        spec, on_fail="collect", seed=request["seed"], only=[name], long=request["long"]
    )
    return json.dumps(asdict(record))


@cache
def _resolved(target: str) -> Any:
    from efficient_attn.backends import resolve

    return resolve(target)


def _rehearse(spec: Any) -> None:
    """Build and call the backend once, to find hangs and crashes before it runs in the user's process."""
    import torch

    from efficient_attn.backends import build

    try:
        with contained(), torch.no_grad():
            backend = build(spec, head_dim=_HEAD_DIM, num_heads=_HEADS, max_tokens=_TOKENS).eval()
            backend(*torch.randn(3, 1, _HEADS, _TOKENS, _HEAD_DIM))
    except Exception as error:
        # The study will meet and record the same exception.
        described(error)
