"""Single faults in attentions that are right otherwise: each is caught by the check of its promise.

Every fault is laid over an exact base and over one that is right without being softmax attention, for which
nothing but relations between calls can tell.
"""

import faulty as f
import pytest
import torch
from test_broken import EXACT, spec_of
from twins import Softmax

from efficient_attn.registry import BackendSpec, Capabilities, NoOptions
from efficient_attn.testing import check_backend, check_names

OTHER = Capabilities(
    causal=True, second_derivatives=True, approximates_softmax=False, time_growth=2, memory_growth=2
)
TWO_WHOLE = Capabilities(causal=False, cross=False, key_mask=False, exact=True, time_growth=1)

FAULTS = (
    (f.ThirdSequenceReadsTheSecond, "every_sequence_is_its_single_call"),
    (f.FourthSequenceHasTheMaskOfTheFirst, "every_sequence_is_its_single_call"),
    (f.LaterHeadsAreSharper, "every_head_is_its_single_call"),
    (f.ThreeGroupsInTurn, "grouped_queries_are_repeated_heads"),
    (f.ScalesByTheValues, "columns_of_values_are_computed_alone"),
    (f.WideValuesAreCut, "columns_of_values_are_computed_alone"),
    (f.BeyondFlatter, "masked_keys_leave_no_gap"),
    (f.BeyondFlatter500, "masked_keys_leave_no_gap"),
    (f.DropsThePartialBlock, "order_of_keys_does_not_matter"),
    (f.DropsTheLastKeyOfFullBlocks, "order_of_keys_does_not_matter"),
    (f.ForgetsBeyond256, "masked_keys_leave_no_gap"),
    (f.FirstRowIsOff, "order_of_queries_is_order_of_outputs"),
    (f.LastRowIsOff, "a_query_alone_is_its_row"),
    (f.IgnoresMasksInCrossAttention, "masked_keys_leave_no_gap"),
    (f.IgnoresMasksWhereCausal, "masked_keys_leave_no_gap"),
    (f.MultipliesLongMasks, "padding_contents_change_no_bit"),
    (f.ReadsMasksFromMemory, "layout_in_memory_does_not_matter"),
    (f.MasksOfTrueHideTheLast, "a_mask_of_real_keys_changes_nothing"),
    (f.ScoresInFloat32, "float64_is_float64_throughout"),
    (f.ValuesInFloat32, "float64_is_float64_throughout"),
    (f.ScoresInFloat16, "float32_is_float32_throughout"),
    (f.ValuesInBfloat16, "float32_is_float32_throughout"),
    (f.WeightsInFloat16, "float32_is_float32_throughout"),
    (f.HalfBeyond128, "float32_is_float32_throughout"),
    (f.AddsAnEpsilon, "weights_of_a_row_sum_to_one"),
    (f.TakesTheScaleAsPositive, "a_negative_scale_turns_queries_round"),
    (f.IgnoresTheScale, "scale_is_a_factor_on_the_scores"),
    (f.DetachesLongKeys, "gradients_hold_at_every_shape"),
    (f.HalvesTheGradientOfOtherValues, "gradients_hold_at_every_shape"),
    (f.WrongWhereAllAsk, "what_is_frozen_changes_no_gradient"),
    (f.WrongWhereQueriesAreFrozen, "what_is_frozen_changes_no_gradient"),
    (f.NoGradientInLongFloat32, "gradients_in_narrow_dtypes_lose_only_rounding"),
    (f.WrongGradientWhereMaskedAndCausal, "gradients_hold_at_every_shape"),
    (f.WrongGradientInGroups, "gradients_hold_at_every_shape"),
    (f.WritesToWhatFlowsBack, "layout_changes_no_gradient"),
    (f.ReadsGradientsFromMemory, "layout_changes_no_gradient"),
    (f.AnotherGradientTheSecondTime, "layout_changes_no_gradient"),
    (f.TrainsOnSomethingElse, "the_same_call_gives_the_same_bits"),
    (f.WritesToLongKeys, "inputs_are_not_written_to"),
    (f.WritesToTheMask, "inputs_are_not_written_to"),
    (f.HandsOutSingleValues, "outputs_are_the_callers"),
    (f.ReusesItsOutput, "outputs_are_the_callers"),
    (f.KeepsMasksByShape, "a_hundred_calls_leave_no_trace"),
    (f.KeepsMasksByQueries, "a_query_alone_is_its_row"),
    (f.KeepsOutputsByAddress, "a_hundred_calls_leave_no_trace"),
    (f.ChangesAfterSixtyCalls, "a_hundred_calls_leave_no_trace"),
    (f.KeepsWhatInferenceModeMade, "modes_change_nothing"),
    (f.FactorIsNoParameter, "gradients_reach_parameters_only"),
    (f.KeepsTheCallersBuffers, "parts_of_any_size_are_the_whole"),
    (f.WritesToItsState, "any_number_of_sequences_go_on_from_a_state"),
    (f.TruncatesLongStates, "long_states_are_whole"),
    (f.TruncatesStates, "parts_of_any_size_are_the_whole"),
    (f.NoTokensEndTheState, "parts_of_any_size_are_the_whole"),
    (f.ForgetsTheMaskLater, "parts_of_any_size_are_the_whole"),
    (f.ReadsAheadWhenExtending, "parts_of_any_size_are_the_whole"),
    (f.StatesInHalfPrecision, "parts_of_any_size_are_the_whole"),
    (f.DetachesItsState, "gradients_pass_through_states"),
    (f.GroupsWrongWhenExtending, "parts_of_any_size_are_the_whole"),
    (f.ReusesItsOutputWhenExtending, "parts_of_any_size_are_the_whole"),
    (f.ComputesInTheDefaultDtype, "the_default_dtype_changes_nothing"),
    (f.SeedsFromTheGlobalGenerator, "global_seeds_change_nothing"),
    (f.DropsOutInTraining, "global_seeds_change_nothing"),
    (f.SetsTheGlobalSeed, "nothing_global_is_touched"),
    (f.SetsTheMatmulPrecision, "nothing_global_is_touched"),
    (f.SetsTheThreads, "nothing_global_is_touched"),
    (f.WarnsOfLongTexts, "calls_are_silent"),
    (f.ReturnsAutocastDtype, "outputs_have_the_shape_and_dtype_asked_for"),
    (f.DrawsAnew, "the_same_call_gives_the_same_bits"),
)
LEARNED = (
    (f.KeepsItsFirstFactor, "a_hundred_calls_leave_no_trace"),
    (f.DetachesItsFactor, "gradients_hold_at_every_shape"),
    (f.CopiesShareEverything, "a_copy_is_equal_and_apart"),
)
GROWING = (
    (f.TrainsInQuadraticMemory, "memory_grows_as_declared"),
    (f.BuildsAMaskOfAllPairs, "memory_grows_as_declared"),
    (f.TakesQuadraticTime, "time_grows_as_declared"),
)
CONTROLS = {
    "softmax": spec_of(Softmax, EXACT, NoOptions, None),
    "kernel": spec_of(f.Kernel, OTHER, NoOptions, None),
    "tempered": spec_of(f.Tempered, OTHER, NoOptions, None),
    "linear-memory": spec_of(f.LinearMemory, TWO_WHOLE, NoOptions, None),
}


@pytest.fixture(autouse=True)
def products_as_they_were():
    """A fault that sets the precision of matrix products leaves it to no later test of the process."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def with_fault(fault: type, base: type, capabilities: Capabilities) -> BackendSpec:
    return spec_of(type(f"{fault.__name__}{base.__name__}", (fault, base), {}), capabilities, NoOptions, None)


FAULTY = [
    *((with_fault(fault, Softmax, EXACT), check) for fault, check in FAULTS),
    *((with_fault(fault, f.Kernel, OTHER), check) for fault, check in FAULTS),
    *((with_fault(fault, f.Tempered, OTHER), check) for fault, check in LEARNED),
    *((with_fault(fault, f.LinearMemory, TWO_WHOLE), check) for fault, check in GROWING),
]
# One of each kind runs at every test, all of them by hand.
QUICK = {"LaterHeadsAreSharper", "WrongWhereAllAsk", "KeepsTheCallersBuffers", "FirstRowIsOff"}


def _case(spec: BackendSpec, check: str):
    quick = any(spec.name.startswith(name) for name in QUICK)
    return pytest.param(spec, check, id=spec.name, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("spec", "check"), [_case(*one) for one in FAULTY])
def test_a_fault_is_caught_by_the_check_of_its_promise(spec: BackendSpec, check: str) -> None:
    (record,) = check_backend(spec, only=[check], on_fail="collect")
    assert (record.outcome, record.failed) == ("broken", True), record


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("control", CONTROLS)
def test_what_has_no_fault_passes_every_check(control: str, seed: int) -> None:
    names = [name for name in check_names() if name != "compiled_it_is_the_same"]
    check_backend(CONTROLS[control], only=names, seed=seed)
