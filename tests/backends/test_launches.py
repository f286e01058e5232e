"""Bounds on kernel launches and host synchronisations of every backend on the path of another device."""

from functools import cache
from typing import NamedTuple

import pytest
import torch
from kernel_launches import COUNTED, Count, counted, forward, forward_backward, other_device, prepared, step

import efficient_attn as ea
from efficient_attn.ops.paths import VARIABLE

# Four chunks of the path in chunks of 64.
TOKENS = 256


class Bound(NamedTuple):
    """Launches of a forward pass, of a pass with gradients, and of a step of one token."""

    forward: int
    gradients: int
    step: int | None = None


def by_causality(rows: dict[str, tuple[Bound, ...]]) -> dict[tuple[str, bool], Bound]:
    """Bounds by backend and causality, from rows of the bidirectional and the causal bound."""
    return {(name, bool(causal)): x for name, row in rows.items() for causal, x in enumerate(row)}


OTHERS = {
    "exact": (Bound(1, 2), Bound(1, 2, 3)),
    "exact-dense": (Bound(4, 10), Bound(12, 20, 14)),
    "linformer": (Bound(20, 33),),
    "nystrom": (Bound(96, 223),),
    "oracle-topk": (Bound(19, 40), Bound(29, 52, 31)),
    "bigbird": (Bound(121, 179), Bound(104, 134, 24)),
    "block-topk": (Bound(47, 75), Bound(64, 94, 30)),
    "window": (Bound(22, 46), Bound(22, 46, 3)),
    "window-clusters": (Bound(96, 185),),
}
# Wanted per segment of linear attention: 80 launches forward and 300 with gradients, each 120 more where weak
# chunks of exponential features are computed again, and 3 that lift small upstream gradients; 22 for a step.
# Only Taylor features, and performer-full with its transform of the inputs, take more.
LINEAR = {
    "linear-elu": (Bound(42, 92), Bound(182, 451, 14)),
    "linear-hedgehog": (Bound(48, 96), Bound(184, 436, 24)),
    "linear-relu": (Bound(39, 104), Bound(75, 226, 13)),
    "linear-taylor-1": (Bound(49, 130), Bound(87, 283, 24)),
    "linear-taylor-2": (Bound(67, 190), Bound(114, 391, 33)),
    "performer-full": (Bound(54, 104), Bound(197, 473, 23)),
    "performer-hyperbolic": (Bound(46, 92), Bound(191, 477, 12)),
    "performer-oprf": (Bound(49, 95), Bound(192, 464, 18)),
    "performer-positive": (Bound(41, 85), Bound(183, 452, 10)),
    "performer-trig": (Bound(45, 118), Bound(81, 261, 22)),
}
OTHERS, LINEAR = by_causality(OTHERS), by_causality(LINEAR)
BOUNDS = {**OTHERS, **LINEAR}
# Of linear backends one full and one causal case in six are in the quick run.
ONE_OF_SIX = [
    pytest.param(*key, marks=() if number % 6 in (0, 5) else pytest.mark.slow)
    for number, key in enumerate(LINEAR)
]


@cache
def counts(name: str, causal: bool, tokens: int = TOKENS, norm: float = 1.0) -> dict[str, Count]:
    with other_device():
        backend, inputs = prepared(name, causal=causal, tokens=tokens, heads=2, head_dim=8)
        inputs = [norm * inputs[0], norm * inputs[1], inputs[2]]
        results = {"forward": forward(backend, inputs), "gradients": forward_backward(backend, inputs)}
        if causal and ea.spec(name).capabilities.streaming:
            results["step"] = step(backend, inputs)
    return results


def test_every_backend_has_bounds():
    cases = {(name, causal) for causal in (False, True) for name in ea.list_backends(causal=causal or None)}
    assert set(BOUNDS) == cases


@pytest.mark.parametrize(("name", "causal"), [*OTHERS, *ONE_OF_SIX])
def test_launches_and_synchronisations_stay_within_their_bounds(name, causal):
    bound, results = BOUNDS[name, causal], counts(name, causal)
    assert ("step" in results) == (bound.step is not None)
    for verb, count in results.items():
        assert not count.syncs, f"{verb}: {count.syncs}"
        if verb != "gradients" or COUNTED:
            assert count.launches <= getattr(bound, verb), f"{verb}: {count.operators}"


@pytest.mark.parametrize(("name", "causal"), OTHERS)
def test_launches_of_other_backends_do_not_grow_with_the_length(name, causal):
    short, long = (counts(name, causal, tokens=tokens) for tokens in (2 * TOKENS, 4 * TOKENS))
    for verb in short if COUNTED else short.keys() - {"gradients"}:
        assert long[verb].launches <= short[verb].launches


@pytest.mark.parametrize(("name", "causal"), ONE_OF_SIX)
def test_launches_of_linear_backends_depend_on_neither_length_nor_values(name, causal):
    bound = LINEAR[name, causal]
    for results in (counts(name, causal, tokens=2 * TOKENS), counts(name, causal, norm=20.0)):
        assert results["forward"].launches <= bound.forward
        assert not COUNTED or results["gradients"].launches <= bound.gradients
        assert not any(count.syncs for count in results.values())
    quiet, loud = (counts(name, causal, norm=norm)["gradients"].operators for norm in (1.0, 20.0))
    assert quiet == loud


def test_a_launch_is_an_operator_that_neither_views_nor_allocates():
    x = torch.ones(3, 4)
    count = counted(lambda: torch.empty_like(x.mT[1:]).copy_(x.mT[1:]).add_(1) @ torch.ones(3))
    assert count.operators == {"copy_": 1, "add_": 1, "ones": 1, "mv": 1}


def test_a_question_of_the_host_is_a_synchronisation_with_its_line(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    x = torch.arange(3.0)
    assert counted(lambda: x[x > 1] * x.sum().item()).syncs == {"elsewhere": 2}
    # On the CPU the host asks whether plain features stayed in range.
    backend, inputs = prepared("linear-elu", causal=True, tokens=TOKENS, heads=2, head_dim=8)
    places = [place.partition(":")[0] for place in forward(backend, inputs).syncs]
    assert places == ["ops/linear/inputs.py"]
