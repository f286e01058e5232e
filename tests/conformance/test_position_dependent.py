"""Functions without declared capabilities: positions may matter, and faults are found all the same."""

import plain_functions
import pytest

import efficient_attn as ea
from efficient_attn.conformance.records import POSITION_DEPENDENT
from efficient_attn.testing import check_names

# Runtime shape checks make torch.compile stumble.
NAMES = [name for name in check_names() if name != "compiled_it_is_the_same"]


def records_of(name):
    records = ea.check(getattr(plain_functions, name), only=NAMES, on_fail="collect")
    return {record.check: record for record in records}


@pytest.mark.parametrize("name", ["local_window", "strided", "alibi", "by_distance"])
def test_nothing_is_asked_that_a_position_dependent_attention_cannot_keep(name):
    records = records_of(name)
    assert not [record.sentence() for record in records.values() if record.failed]
    skipped = {check for check, record in records.items() if record.detail == POSITION_DEPENDENT}
    assert {"order_of_keys_does_not_matter", "a_query_alone_is_its_row"} <= skipped
    assert records["no_state_between_calls"].outcome == "kept"


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("memoising", "no_state_between_calls"),
        ("mixed_sequences", "every_sequence_is_its_single_call"),
        ("unwritten_row", "the_same_call_gives_the_same_bits"),
        ("aliased", "outputs_are_not_aliased"),
    ],
)
def test_a_fault_of_a_position_dependent_function_is_found(name, check):
    assert records_of(name)[check].failed


def test_a_random_function_is_not_called_position_dependent():
    records = ea.check(plain_functions.dropping, only=["order_of_keys_does_not_matter"], on_fail="collect")
    assert [record.outcome for record in records] == ["broken"]


def test_keys_that_no_query_reads_are_information():
    (record,) = ea.check(plain_functions.strided, only=["every_column_is_read"])
    assert record.detail == "97 of 130 keys have no gradient: no query reads them."
    (record,) = ea.check("exact", only=["every_column_is_read"])
    assert (record.outcome, record.detail) == ("kept", "")


def test_a_function_that_declares_softmax_is_still_tested_for_state_without_masks():
    memoising = ea.testing.adapt(plain_functions.memoising, exact=True)
    (record,) = ea.check(memoising, only=["no_state_between_calls"], on_fail="collect")
    assert record.failed and record.detail.startswith("Different inputs give the same output")
