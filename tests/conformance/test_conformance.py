"""Every registered backend goes through the public suite, check by check; and the suite's own manners."""

from dataclasses import replace

import jaxtyping
import pytest
import torch
from base_cores import with_gradient

import efficient_attn as ea
from efficient_attn.conformance.table import CHECKS as TABLE
from efficient_attn.registry import Capabilities
from efficient_attn.testing import BrokenPromiseError, check_names

COMPILED = "compiled_it_is_the_same"
# Runtime shape checks make torch.compile stumble, and draw from `random` to choose what they look at.
WITHOUT_SHAPE_CHECKS = (COMPILED, "nothing_global_is_touched")
# One of each kind: the others share their algorithms.
LONG = ("exact", "linformer", "performer-positive", "performer-trig", "window", "window-clusters")
# Checks that visit every path of `ops`, of one of each kind. Shape checks double the time, and only repeat
# themselves in others.
WITH_SHAPE_CHECKS = (
    *("any_number_of_sequences_go_on_from_a_state", "gradients_hold_at_every_shape"),
    *("grouped_queries_are_repeated_heads", "empty_inputs_give_empty_outputs"),
)
# Every pair of these takes less than 20 ms.
CHEAP = (
    *("a_window_reads_its_neighbourhood", "calibration_is_an_explicit_act", "the_size_matters"),
    *("empty_inputs_give_empty_outputs", "what_is_not_promised_is_refused"),
)
TURNS, TURN = 20, 14
BACKENDS, NAMES = ea.list_backends(), check_names()
LONG_CHECKS = {name for name, check in TABLE.items() if check.is_long or check.long(0)}


def marks(backend: int, check: str) -> list[pytest.MarkDecorator]:
    # All pairs take minutes, and backends share algorithms as checks share bodies: by a fixed rotation the
    # quick run has each check with one backend and each backend with a twentieth of the checks.
    quick = check in CHEAP or (backend + NAMES.index(check)) % TURNS == TURN
    return [pytest.mark.compile] * (check in WITHOUT_SHAPE_CHECKS) + [pytest.mark.slow] * (not quick)


CHECKS = [
    pytest.param(name, check, id=f"{name}-{check}", marks=marks(number, check))
    for number, name in enumerate(BACKENDS)
    for check in NAMES
]


@pytest.mark.parametrize("check", [pytest.param(name, marks=marks(len(BACKENDS), name)) for name in NAMES])
def test_a_window_with_global_tokens_keeps_what_a_window_promises(check, monkeypatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", check not in WITH_SHAPE_CHECKS)
    # A window so short that the global tokens of a few tokens lie behind it.
    ea.check(ea.build("window", head_dim=4, window=5, global_tokens=2), only=[check])


UNDECLARED = {
    "padding_contents_change_no_bit": "skipped, undeclared",
    "equals_softmax_attention": "passes, undeclared",
    "grouped_queries_are_repeated_heads": "skipped, undeclared",
    "gradients_are_those_of_finite_differences": "kept",
}
PLAIN = Capabilities(causal=False, key_mask=False, exact=True)
EXACT = {"capabilities": PLAIN, "only": ["equals_softmax_attention"]}


def attend(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v


def forgets_its_scale(q, k, v):
    return attend_in_groups(q * (8.0 if q.shape[-1] == 64 else 1.0), k, v)


def doubles_sums(q, k, v):
    return with_gradient(attend_in_groups(q, k, v), lambda x: x * (1.0 if any(x.stride()) else 2.0))


def attend_in_groups(q, k, v):
    return attend(q, *(x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v)))


def uniform(q, k, v):
    return v.mean(dim=2, keepdim=True).expand(-1, -1, q.shape[2], -1)


@pytest.mark.parametrize(("backend", "check"), CHECKS)
def test_a_registered_backend_keeps_what_it_promises(backend, check, monkeypatch) -> None:
    with_shape_checks = backend in LONG and check in WITH_SHAPE_CHECKS
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", not with_shape_checks)
    ea.check(backend, only=[check])


@pytest.mark.slow
@pytest.mark.parametrize("check", sorted(LONG_CHECKS - {*WITHOUT_SHAPE_CHECKS}))
@pytest.mark.parametrize("backend", LONG)
def test_a_registered_backend_keeps_what_it_promises_at_long_lengths(backend, check, monkeypatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    # The shorter inputs are those of the quick form.
    monkeypatch.setitem(TABLE, check, replace(TABLE[check], cases=(), drawn=lambda seed: ()))
    ea.check(backend, only=[check], long=True)


def test_a_name_a_spec_a_builder_and_a_built_backend_are_checked_alike() -> None:
    built = ea.build("exact-dense", head_dim=4)
    for thing in ("exact-dense", built.spec, built.spec.builder, built):
        (record,) = ea.check(thing, only=["fully_masked_rows_give_zeros"])
        assert (record.backend, record.outcome) == ("exact-dense", "kept")


@pytest.mark.parametrize("name", ["exact", "window"])
def test_a_backend_with_a_compute_dtype_is_held_to_the_rounding_of_this_dtype(name) -> None:
    checks = ["equals_softmax_attention", "parts_of_any_size_are_the_whole"]
    built = ea.build(name, head_dim=4, compute_dtype="bfloat16")
    outcomes = [record.outcome for record in ea.check(built, only=checks)]
    assert outcomes == ["kept" if name == "exact" else "not promised", "kept"]


def test_directions_of_fixed_norm_are_not_held_to_an_error_that_falls() -> None:
    built = ea.build("performer-positive", head_dim=4, norms="fixed")
    (record,) = ea.check(built, only=["more_features_come_nearer_to_softmax"])
    assert (record.outcome, record.detail) == ("not promised", "Not promised: converges.")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["performer-positive", "performer-trig", "performer-oprf", "performer-full"])
def test_directions_of_fixed_norm_keep_every_other_promise(name) -> None:
    built = ea.build(name, head_dim=4, norms="fixed")
    skipped = {*WITHOUT_SHAPE_CHECKS}
    for record in ea.check(built, only=[check for check in NAMES if check not in skipped]):
        assert not record.failed, record


def test_a_function_fails_nothing_that_it_never_declared() -> None:
    records = {record.check: record for record in ea.check(attend, only=list(UNDECLARED))}
    assert {check: record.outcome for check, record in records.items()} == UNDECLARED
    assert "Not declared: key mask." in records["padding_contents_change_no_bit"].detail


def test_what_a_function_is_said_to_promise_is_held_against_it() -> None:
    (record,) = ea.check(uniform, on_fail="collect", **EXACT)
    assert (record.outcome, record.failed) == ("broken", True) and record.error > record.bound
    # With one token there is nothing to tell apart: the smallest input that shows it has two.
    assert "k [1, 1, 2, 1]" in record.detail
    modest = {**EXACT, "capabilities": Capabilities(causal=False, key_mask=False)}
    (record,) = ea.check(attend_in_groups, on_fail="collect", **modest)
    assert (record.outcome, record.failed) == ("passes, undeclared", True)


@pytest.mark.parametrize(
    ("function", "check"),
    [(forgets_its_scale, "equals_softmax_attention"), (doubles_sums, "layout_changes_no_gradient")],
)
def test_faults_of_a_function_at_usual_sizes_and_in_sums_are_caught(function, check) -> None:
    for checked, outcome in ((attend_in_groups, "kept"), (function, "broken")):
        (record,) = ea.check(checked, capabilities=PLAIN, only=[check], on_fail="collect")
        assert record.outcome == outcome


def test_an_expected_failure_passes_and_one_that_is_kept_fails() -> None:
    expected = {"equals_softmax_attention": "It averages."}
    (record,) = ea.check(uniform, expected_failures=expected, **EXACT)
    assert (record.outcome, record.failed, record.expected) == ("broken", False, "It averages.")
    with pytest.raises(BrokenPromiseError, match=r"(?s)fails 1 of 1 checks.*expected: It averages\."):
        ea.check(attend_in_groups, expected_failures=expected, **EXACT)


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"on_fail": "ignore"}, ea.OptionError, "on_fail is"),
        ({"only": ["fully_masked_rows_give_zero"]}, ea.UnknownNameError, "'fully_masked_rows_give_zeros'"),
        ({"expected_failures": {"padding": "why"}}, ea.UnknownNameError, "No check is called"),
    ],
)
def test_a_wrong_request_names_what_is_wrong(request_, error, message) -> None:
    with pytest.raises(error, match=message):
        ea.check("exact", **request_)


def test_parameters_of_a_module_from_outside_are_left_as_they_are() -> None:
    class Mixing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(torch.ones(()))

        def forward(self, q, k, v):
            return attend(q * self.factor, k, v)

    module = Mixing().train()
    ea.check(module, only=["weights_of_a_row_sum_to_one", "a_saved_state_brings_the_output_back"])
    assert module.factor.dtype == torch.float32 and module.factor.detach() == 1.0 and module.training
