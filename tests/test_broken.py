"""Faults that published code has, each caught by the check that is named for the promise it breaks."""

import pytest
from broken import PAIRS, Pair

from efficient_attn.testing import check_backend, check_names

NAMED = [pytest.param(pair, id=f"{pair.broken.name}-{pair.check}") for pair in PAIRS]


def outcome(spec, check: str) -> str:
    (record,) = check_backend(spec, only=[check], on_fail="collect")
    return record.outcome


@pytest.mark.parametrize("pair", NAMED)
def test_a_fault_is_caught_by_the_check_of_its_promise(pair: Pair) -> None:
    (record,) = check_backend(pair.broken, only=[pair.check], on_fail="collect")
    assert (record.outcome, record.failed) == ("broken", True)
    # Something is wrong with its numbers; it does not merely stumble.
    assert "raised" not in record.detail
    assert "q [" in record.detail


@pytest.mark.parametrize("pair", NAMED)
def test_the_twin_without_the_fault_passes_that_check(pair: Pair) -> None:
    assert outcome(pair.twin, pair.check) == "kept"


@pytest.mark.slow
@pytest.mark.parametrize("twin", {pair.twin.name: pair.twin for pair in PAIRS}.values(), ids=lambda s: s.name)
def test_the_twins_pass_every_check(twin) -> None:
    check_backend(twin, only=[name for name in check_names() if name != "compiled_it_is_the_same"])
