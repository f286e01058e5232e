"""Faults that published code has, or could have: each is caught by the check of its promise.

Most are laid over a base that is right without being softmax attention, for which nothing but relations
between calls can tell.
"""

from dataclasses import replace

import pytest
import torch
from base_cores import (
    Alone,
    Kernel,
    LinearMemory,
    Positive,
    Softmax,
    Tempered,
    Window,
    WindowOptions,
    with_gradient,
)
from call_faults import OF_CALLS
from fault_steps import scores
from output_faults import (
    EXCHANGED,
    FAULTS,
    GROWING,
    LEARNED,
    LONG,
    OF_ALONE,
    OF_POSITIVE,
    OF_SOFTMAX,
    OF_WINDOW,
)
from torch import Tensor, nn

import efficient_attn as ea
from efficient_attn.backends.linear_attention import RandomFeatureOptions
from efficient_attn.distributed.calls import EXCHANGES, Exchange
from efficient_attn.registry import BackendSpec, Capabilities, NoOptions
from efficient_attn.testing import check_names

RANDOM = Capabilities(causal=True, second_derivatives=True, time_growth=2, memory_growth=2)
EXACT = replace(RANDOM, exact=True, sharded="keys")
TWO_WHOLE = Capabilities(causal=False, cross=False, key_mask=False, exact=True, time_growth=1)


def _spec(core: type, capabilities: Capabilities, options: type = NoOptions, size=None):
    return BackendSpec(
        name=core.__name__,
        summary=f"{core.__name__}, a backend of the tests.",
        options_type=options,
        size_option=size,
        capabilities=capabilities,
        builder=core,
    )


BASES = {
    "softmax": _spec(Softmax, EXACT),
    "kernel": _spec(Kernel, replace(RANDOM, approximates_softmax=False)),
    "tempered": _spec(Tempered, replace(RANDOM, approximates_softmax=False)),
    "linear-memory": _spec(LinearMemory, TWO_WHOLE),
    "positive": _spec(Positive, RANDOM, RandomFeatureOptions, "num_features"),
    "alone": _spec(Alone, replace(RANDOM, batch_invariant=True)),
    "window": _spec(Window, replace(RANDOM, cross=False), WindowOptions, "window"),
}
# Differentiable once.
ONCE = replace(EXACT, second_derivatives=False, sharded=None)
# What `ea.Backend` does around every core, which no fault of a core can break; tests/mutants.tsv breaks it.
AROUND = {
    "calibration_is_an_explicit_act",
    "empty_inputs_give_empty_outputs",
    "what_is_not_promised_is_refused",
}
# A fault is caught by its numbers, except for these, which end in an error.
RAISING = {
    "a_saved_state_brings_the_output_back-last output",
    "global_settings_change_nothing-device",
    "compiled_it_is_the_same-branch",
    "gradients_are_those_of_finite_differences-values",
    "modes_change_nothing-kept tensor",
    "second_derivatives_are_right_or_refused-groups",
}
# One of each kind runs at every test, all of them by hand.
QUICK = {
    *("keys are cleaned", "counted", "later heads are sharper", "largest future key", "first row"),
    *("caller's buffers", "all are asked for"),
}
TABLES = (
    ("kernel", FAULTS),
    ("kernel", OF_CALLS),
    ("softmax", OF_SOFTMAX),
    ("positive", OF_POSITIVE),
    ("window", OF_WINDOW),
    ("alone", OF_ALONE),
    ("tempered", LEARNED),
    ("linear-memory", GROWING),
    ("softmax", LONG),
)
CASES = [
    pytest.param(
        base, check, name, fault, id=f"{check}-{name}-{base}", marks=[pytest.mark.slow] * (name not in QUICK)
    )
    for base, table in TABLES
    for check, of_check in table.items()
    for name, fault in of_check.items()
]
# Every base with each check that a fault of it breaks. Checks of the long form hold for `exact` in
# test_conformance.py; compiled code stumbles over checked shapes.
CONTROLS = [
    control
    for control in dict.fromkeys(case.values[:2] for case in CASES)
    if control[1] in check_names() and control[1] != "compiled_it_is_the_same"
]


@pytest.fixture(autouse=True)
def settings_as_they_were():
    """Keep the settings that a fault leaves behind from later tests."""
    softmax = nn.functional.softmax
    yield
    torch.set_flush_denormal(False)
    torch.set_default_dtype(torch.float32)
    nn.functional.softmax = softmax


def outcome(spec: BackendSpec, check: str, *, long: bool = False) -> tuple[str, bool, bool]:
    """The outcome, whether it fails, and whether the backend stumbles rather than gives wrong numbers."""
    (record,) = ea.check(spec, only=[check], on_fail="collect", long=long)
    return record.outcome, record.failed, "It raised" in record.detail


@pytest.mark.parametrize(("base", "check", "name", "fault"), CASES)
def test_a_fault_is_caught_by_the_check_of_its_promise(base: str, check: str, name: str, fault: type) -> None:
    control = BASES[base]
    core = type(f"Faulty{control.builder.__name__}", (fault, control.builder), {})
    long = name in (*LONG.get(check, ()), "in batches")
    broken = outcome(replace(control, name=core.__name__, builder=core), check, long=long)
    assert broken == ("broken", True, f"{check}-{name}" in RAISING)


def test_second_derivatives_that_are_lost_in_silence_are_caught() -> None:
    lost = scores(lambda x: with_gradient(x, Tensor.detach))
    spec = _spec(type("Once", (lost, Softmax), {}), ONCE)
    assert outcome(spec, "second_derivatives_are_right_or_refused") == ("broken", True, False)


@pytest.mark.parametrize("exchange", EXCHANGED)
def test_a_wrong_exchange_between_ranks_is_caught(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXCHANGES, "wrong", Exchange(EXCHANGED[exchange]))
    spec = _spec(Softmax, replace(EXACT, sharded="wrong"))
    assert outcome(spec, "parts_on_several_ranks_are_the_whole") == ("broken", True, False)


def test_equal_bits_without_the_capability_are_luck() -> None:
    spec = _spec(Alone, RANDOM)
    assert outcome(spec, "bits_do_not_depend_on_the_batch") == ("not promised", False, False)


def test_every_check_has_a_fault() -> None:
    ranks = "parts_on_several_ranks_are_the_whole"
    assert {check for _, table in TABLES for check in table} | {ranks} | AROUND == set(check_names(long=True))


@pytest.mark.slow
@pytest.mark.parametrize(("base", "check"), CONTROLS)
def test_what_has_no_fault_passes_the_check_of_its_faults(base: str, check: str) -> None:
    assert outcome(BASES[base], check) == ("kept", False, False)
