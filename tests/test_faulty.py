"""Single faults in attentions that are right otherwise: each is caught by the check of its promise.

Every fault is laid over an exact base and over one that is right without being softmax attention, for which
nothing but relations between calls can tell.
"""

import faulty_gradients as gradients
import faulty_growth as growth
import faulty_memory as memory
import faulty_numbers as numbers
import faulty_settings as settings
import faulty_shapes as shapes
import faulty_streaming as streaming
import pytest
import torch
from test_broken import EXACT, spec_of
from twins import Kernel, LinearMemory, Softmax, Tempered

import efficient_attn as ea
from efficient_attn.registry import BackendSpec, Capabilities, NoOptions
from efficient_attn.testing import check_names

OTHER = Capabilities(
    causal=True, second_derivatives=True, approximates_softmax=False, time_growth=2, memory_growth=2
)
TWO_WHOLE = Capabilities(causal=False, cross=False, key_mask=False, exact=True, time_growth=1)

FAULTS = (
    (shapes.ThirdSequenceReadsTheSecond, "every_sequence_is_its_single_call"),
    (shapes.FourthSequenceHasTheMaskOfTheFirst, "every_sequence_is_its_single_call"),
    (shapes.LaterHeadsAreSharper, "every_head_is_its_single_call"),
    (shapes.ThreeGroupsInTurn, "grouped_queries_are_repeated_heads"),
    (shapes.ScalesByTheValues, "columns_of_values_are_computed_alone"),
    (shapes.WideValuesAreCut, "columns_of_values_are_computed_alone"),
    (shapes.BeyondFlatter500, "masked_keys_leave_no_gap"),
    (shapes.DropsThePartialBlock, "order_of_keys_does_not_matter"),
    (shapes.DropsTheLastKeyOfFullBlocks, "order_of_keys_does_not_matter"),
    (shapes.ForgetsBeyond256, "masked_keys_leave_no_gap"),
    (shapes.FirstRowIsOff, "order_of_queries_is_order_of_outputs"),
    (shapes.LastRowIsOff, "a_query_alone_is_its_row"),
    (shapes.IgnoresMasksInCrossAttention, "masked_keys_leave_no_gap"),
    (shapes.IgnoresMasksWhereCausal, "masked_keys_leave_no_gap"),
    (shapes.MultipliesLongMasks, "padding_contents_change_no_bit"),
    (shapes.ReadsMasksFromMemory, "layout_in_memory_does_not_matter"),
    (shapes.MasksOfTrueHideTheLast, "a_mask_of_real_keys_changes_nothing"),
    (numbers.ScoresInFloat32, "float64_is_float64_throughout"),
    (numbers.ValuesInFloat32, "float64_is_float64_throughout"),
    (numbers.ScoresInFloat16, "float32_is_float32_throughout"),
    (numbers.ValuesInBfloat16, "float32_is_float32_throughout"),
    (numbers.HalfBeyond128, "float32_is_float32_throughout"),
    (numbers.AddsAnEpsilon, "weights_of_a_row_sum_to_one"),
    (numbers.TakesTheScaleAsPositive, "a_negative_scale_turns_queries_round"),
    (numbers.IgnoresTheScale, "scale_is_a_factor_on_the_scores"),
    (gradients.DetachesLongKeys, "gradients_hold_at_every_shape"),
    (gradients.HalvesTheGradientOfOtherValues, "gradients_hold_at_every_shape"),
    (gradients.WrongWhereAllAsk, "what_is_frozen_changes_no_gradient"),
    (gradients.WrongWhereQueriesAreFrozen, "what_is_frozen_changes_no_gradient"),
    (gradients.NoGradientInLongFloat32, "gradients_in_narrow_dtypes_lose_only_rounding"),
    (gradients.WrongGradientWhereMaskedAndCausal, "gradients_hold_at_every_shape"),
    (gradients.WrongGradientInGroups, "gradients_hold_at_every_shape"),
    (gradients.WritesToWhatFlowsBack, "layout_changes_no_gradient"),
    (gradients.ReadsGradientsFromMemory, "layout_changes_no_gradient"),
    (gradients.AnotherGradientTheSecondTime, "layout_changes_no_gradient"),
    (settings.TrainsOnSomethingElse, "the_same_call_gives_the_same_bits"),
    (memory.WritesToLongKeys, "inputs_are_not_written_to"),
    (memory.WritesToTheMask, "inputs_are_not_written_to"),
    (memory.HandsOutSingleValues, "outputs_are_the_callers"),
    (memory.ReusesItsOutput, "outputs_are_the_callers"),
    (memory.KeepsMasksByShape, "a_hundred_calls_leave_no_trace"),
    (memory.KeepsMasksByQueries, "a_query_alone_is_its_row"),
    (memory.KeepsOutputsByAddress, "a_hundred_calls_leave_no_trace"),
    (memory.ChangesAfterSixtyCalls, "a_hundred_calls_leave_no_trace"),
    (memory.KeepsWhatInferenceModeMade, "modes_change_nothing"),
    (gradients.FactorIsNoParameter, "gradients_reach_parameters_only"),
    (streaming.KeepsTheCallersBuffers, "parts_of_any_size_are_the_whole"),
    (streaming.TruncatesLongStates, "long_states_are_whole"),
    (streaming.NoTokensEndTheState, "parts_of_any_size_are_the_whole"),
    (streaming.ForgetsTheMaskLater, "parts_of_any_size_are_the_whole"),
    (streaming.ReadsAheadWhenExtending, "parts_of_any_size_are_the_whole"),
    (streaming.StatesInHalfPrecision, "parts_of_any_size_are_the_whole"),
    (streaming.GroupsWrongWhenExtending, "parts_of_any_size_are_the_whole"),
    (streaming.ReusesItsOutputWhenExtending, "parts_of_any_size_are_the_whole"),
    (settings.ComputesInTheDefaultDtype, "the_default_dtype_changes_nothing"),
    (settings.SeedsFromTheGlobalGenerator, "global_seeds_change_nothing"),
    (settings.SetsTheMatmulPrecision, "nothing_global_is_touched"),
    (settings.SetsTheThreads, "nothing_global_is_touched"),
    (settings.WarnsOfLongTexts, "calls_are_silent"),
    (settings.ReturnsAutocastDtype, "outputs_have_the_shape_and_dtype_asked_for"),
    (settings.DrawsAnew, "the_same_call_gives_the_same_bits"),
    (shapes.BlindRowsReadAtHeadDim64, "blind_queries_give_zeros"),
    (shapes.BlindRowsAreNanAtHeadDim64, "blind_queries_give_zeros"),
    (shapes.GroupsInTurnAtHeadDim64, "sizes_of_models_are_single_calls"),
    (shapes.IgnoresMasksOfThreeWideSequences, "sizes_of_models_are_single_calls"),
    (shapes.ReadsWideHeadsFromMemory, "sizes_of_models_are_single_calls"),
    (numbers.CutsValuesInFloat16, "large_values_stay_proportional"),
    (numbers.NormalisesFloat16Last, "large_values_stay_proportional"),
    (numbers.CleansWhatFloat16Overflows, "large_values_stay_proportional"),
    (numbers.ValuesOfBfloat16InFloat16, "large_values_stay_proportional"),
    (numbers.DropsEqualKeys, "order_of_keys_does_not_matter"),
    (numbers.TakesScalesBelowOne, "scale_is_a_factor_on_the_scores"),
    (numbers.DefaultOfHeads64, "scale_is_a_factor_on_the_scores"),
    (numbers.ShortensLongKeys, "scale_is_a_factor_on_the_scores"),
    (numbers.RoundsWideHeads, "sizes_of_models_are_single_calls"),
    (numbers.CleansValues, "a_nan_shows_where_it_is_read"),
    (numbers.CleansKeys, "a_nan_shows_where_it_is_read"),
    (numbers.CleansQueries, "a_nan_shows_where_it_is_read"),
    (numbers.CleansOutputs, "a_nan_shows_where_it_is_read"),
    (numbers.CleansOutputsWhereMasked, "a_nan_shows_where_it_is_read"),
    (numbers.CleansNegativeInfinity, "a_nan_shows_where_it_is_read"),
    (numbers.TakesNanForPadding, "a_nan_shows_where_it_is_read"),
    (numbers.CleansScores, "a_nan_shows_where_it_is_read"),
    (gradients.NoGradientOfLongKeys, "gradients_hold_at_long_keys"),
    (gradients.NoGradientOfLongKeysInFloat32, "gradients_hold_at_long_keys"),
    (gradients.CutsGradientsOfLongKeys, "gradients_hold_at_long_keys"),
    (gradients.HalfPrecisionGradientsOfLongKeys, "gradients_hold_at_long_keys"),
    (gradients.HalvesTheGradientOfFloat16, "gradients_in_narrow_dtypes_lose_only_rounding"),
    (gradients.KeepsGraphsUnderNoGrad, "no_graph_is_kept_unasked"),
    (gradients.KeepsGraphsOfStatesUnderNoGrad, "no_graph_is_kept_unasked"),
    (gradients.RemembersItsLastGraph, "no_call_leaves_bytes_behind"),
    (memory.CleansThePaddingInPlace, "inputs_are_not_written_to"),
    (memory.ZeroesNanOfMaskedKeysInPlace, "inputs_are_not_written_to"),
    (memory.WritesAGradient, "inputs_are_not_written_to"),
    (memory.KeepsScoresOfTheSameKeys, "tensors_are_read_anew"),
    (memory.KeepsValuesByAddress, "tensors_are_read_anew"),
    (memory.KeepsMasksById, "tensors_are_read_anew"),
    (memory.KeepsOutputsById, "tensors_are_read_anew"),
    (memory.KeepsKeysWhenExtendingById, "tensors_are_read_anew"),
    (memory.KeepsEveryOutput, "no_call_leaves_bytes_behind"),
    (memory.KeepsEveryGraph, "no_call_leaves_bytes_behind"),
    (memory.KeepsEveryState, "no_call_leaves_bytes_behind"),
    (streaming.HalvesLongStatesInFloat16, "parts_of_any_size_are_the_whole"),
    (streaming.WritesToLongStates, "any_number_of_sequences_go_on_from_a_state"),
    (streaming.MixesSequencesOfLongStates, "gradients_pass_through_states"),
    (streaming.ValuesOfNoColumnsEndTheState, "values_without_columns_are_streamed"),
    (streaming.NeedsAColumnToExtend, "values_without_columns_are_streamed"),
    (settings.DrawsInFloat16, "nothing_global_is_touched"),
    (settings.AdvancesTheGeneratorInFloat16, "nothing_global_is_touched"),
    (settings.AnotherTemperatureOnTwoThreads, "threads_do_not_disturb_each_other"),
    (shapes.LargeBatchesHaveTheMasksOfTheFirst, "every_sequence_is_its_single_call"),
    (shapes.HeadsBeyond16WrapRound, "every_head_is_its_single_call"),
    (shapes.GroupsOfTwelveInTurn, "every_head_is_its_single_call"),
    (shapes.WidthsInStepsOf8, "every_entry_is_read"),
    (shapes.LaterRowsLoseTheirOffset, "queries_are_the_last_positions"),
    (streaming.KeepsARingOf3000, "states_of_thousands_are_whole"),
    (streaming.StallsInHalfPrecision, "states_of_thousands_are_whole"),
    (gradients.HasTheDefaultScaleBackward, "gradients_hold_at_every_shape"),
    (gradients.CutsGradientsAt100, "layout_changes_no_gradient"),
    (gradients.FlushesSmallGradients, "layout_changes_no_gradient"),
    (memory.ChangesAfterThreeHundredCalls, "hundreds_of_calls_wear_nothing_out"),
    (shapes.SequencesBeyond256WrapRound, "every_sequence_is_its_single_call"),
    (shapes.TakesASharedKeyForASharedQuery, "layout_in_memory_does_not_matter"),
    (numbers.FlushesSmallValues, "large_values_stay_proportional"),
    (streaming.ForgetsBeforeLongParts, "states_of_thousands_are_whole"),
    (settings.BranchesOnTheMask, "compiled_it_is_the_same"),
    (settings.CompilesTheUpperLeftTriangle, "compiled_it_is_the_same"),
    (streaming.ForgetsMasksAtStepsWithoutMask, "parts_of_any_size_are_the_whole"),
    (streaming.ForgetsMasksAfterAPartWithoutMask, "parts_of_any_size_are_the_whole"),
    (shapes.TilesTheHeadsOfOneKey, "grouped_queries_are_repeated_heads"),
    (memory.RemembersMasksOfTrueByAddress, "tensors_are_read_anew"),
    (numbers.NoGuardForBlindRowsWhenCompiled, "compiled_it_is_the_same"),
    (memory.KeepsTheLastQueries, "no_graph_is_kept_unasked"),
    (streaming.SingleTokensHaveTheDefaultScale, "parts_of_any_size_are_the_whole"),
    (streaming.SharesSpareMemory, "parts_of_any_size_are_the_whole"),
    (streaming.KeepsBfloat16InFloat16, "large_values_stay_proportional"),
    (streaming.DetachesStatesOf1024, "gradients_pass_through_states"),
    (streaming.KeepsItsPredecessors, "states_keep_no_earlier_states"),
    (settings.DropsOutBeyond512, "the_same_call_gives_the_same_bits"),
    (settings.SeedsBeyond1024, "nothing_global_is_touched"),
    (settings.LeavesGradientModeOn, "nothing_global_is_touched"),
    (settings.FlushesSubnormalNumbers, "nothing_global_is_touched"),
    (memory.KeepsMasksOfAllLengths, "no_call_leaves_bytes_behind"),
    (gradients.ViewsGradientsAsContiguous, "layout_changes_no_gradient"),
    (gradients.RoundsGradientsBeyond1024Queries, "gradients_hold_at_every_shape"),
    (gradients.SumsGradientsOfValuesByTiles, "gradients_of_values_do_not_stall"),
    (shapes.HeadsBeyondTheLastTileAreZero, "every_head_is_its_single_call"),
    (shapes.CutsEntriesBeyond256, "every_entry_is_read"),
    (shapes.ColumnsBeyond256AreZero, "columns_of_values_are_computed_alone"),
    (shapes.PairsBeyond65535AreZero, "every_sequence_is_its_single_call"),
    (shapes.DropsAShortLastTile, "order_of_keys_does_not_matter"),
    (numbers.DividesValuesInFloat16, "large_values_stay_proportional"),
    (numbers.RoundsLargeInputs, "every_sequence_is_its_single_call"),
    (shapes.SharedKeysHaveTheMaskOfTheFirst, "layout_in_memory_does_not_matter"),
    (shapes.ReadsFromTheStartOfMemory, "layout_in_memory_does_not_matter"),
    (shapes.IgnoresMasksOfOneColumn, "layout_in_memory_does_not_matter"),
    (shapes.TurnsOneTensorTwice, "layout_in_memory_does_not_matter"),
    (streaming.ExtendsWithTurnedKeysWrongly, "layout_in_memory_does_not_matter"),
    (gradients.TakesExpandedGradientsForSums, "layout_changes_no_gradient"),
    (gradients.CleansGradients, "a_nan_shows_where_it_is_read"),
    (gradients.GradientsOfScoresInFloat32, "gradients_in_float64_are_float64_throughout"),
    (gradients.GradientsOfScoresInFloat16, "gradients_in_narrow_dtypes_lose_only_rounding"),
    (gradients.ReusesItsWorkspaceBackward, "layout_changes_no_gradient"),
    (gradients.HalvesSecondDerivativesInGroups, "second_derivatives_are_right_or_refused"),
    (memory.KeepsTheLastOutput, "no_graph_is_kept_unasked"),
    (memory.KeepsTheLastMask, "no_graph_is_kept_unasked"),
    (memory.KeepsTheLastUpstreamGradient, "no_graph_is_kept_unasked"),
    (memory.ReusesItsOutputInInferenceMode, "outputs_are_the_callers"),
    (memory.KeepsItsMaskBetweenThreads, "threads_do_not_disturb_each_other"),
    (memory.KeepsAFactorOfItsFirstDtype, "a_saved_state_brings_the_output_back"),
    (settings.LeavesTheDefaultDtypeWhenItFails, "nothing_global_is_touched"),
    (settings.StaysBusyAfterAnError, "nothing_global_is_touched"),
    (settings.ReplacesSoftmax, "nothing_global_is_touched"),
    (settings.CountsItsTrainingCalls, "the_same_call_gives_the_same_bits"),
    (settings.KeepsGraphsUnderNoGradBeyond256, "no_graph_is_kept_unasked"),
    (shapes.MergesHalvesWithoutTheirSums, "padding_on_either_side_does_not_matter"),
    (numbers.TakesAScaleOfZeroForNone, "scale_is_a_factor_on_the_scores"),
    (gradients.ReadsValuesLater, "a_change_before_the_backward_pass_is_noticed"),
    (gradients.WrongGradientInLargeBatches, "gradients_hold_at_every_shape"),
    (memory.WritesToTransposedQueries, "layout_in_memory_does_not_matter"),
    (memory.AsksForGradientsOfItsInputs, "inputs_are_not_written_to"),
    (memory.KeepsCausalMasksOfAllLengths, "no_call_leaves_bytes_behind"),
    (memory.KeepsAGraphThatHasNoCopy, "a_copy_is_equal_and_apart"),
    (numbers.SingleQueriesHaveTheDefaultScale, "scale_is_a_factor_on_the_scores"),
    (numbers.TakesTheScaleAsPositiveBeyond128, "a_negative_scale_turns_queries_round"),
    (shapes.TurnsSquareKeys, "order_of_keys_does_not_matter"),
    (streaming.TakesTheScaleAsPositiveWhenExtending, "parts_of_any_size_are_the_whole"),
    (gradients.HalvesGradientsOfGroupsInBfloat16, "gradients_in_narrow_dtypes_lose_only_rounding"),
    (gradients.DetachesTheLastKeyOfFullTiles, "gradients_hold_at_every_shape"),
    (settings.TrainsOnSomethingElseBeyond128Queries, "the_same_call_gives_the_same_bits"),
    (settings.TurnsGroupsWithoutGradients, "modes_change_nothing"),
    (shapes.DropsHalfATileOf128, "order_of_keys_does_not_matter"),
    (shapes.DropsAKeyOfOddLengthsAt64Heads, "every_head_is_its_single_call"),
)
# Faults that show for scores of any size only.
EXPONENTIAL = ((numbers.OverflowsInLaterBlocks, "extreme_scores_stay_softmax"),)
LEARNED = (
    (memory.KeepsItsFirstFactor, "a_hundred_calls_leave_no_trace"),
    (gradients.DetachesItsFactor, "gradients_hold_at_every_shape"),
    (settings.CopiesShareEverything, "a_copy_is_equal_and_apart"),
)
GROWING = (
    (growth.TrainsInQuadraticMemory, "memory_grows_as_declared"),
    (growth.BuildsAMaskOfAllPairs, "memory_grows_as_declared"),
    (growth.TakesQuadraticTime, "time_grows_as_declared"),
    (growth.BuildsAMaskOfAllPairsBeyond4096, "growth_of_memory_is_not_hidden"),
    (growth.BuildsAMaskOfAllPairsInBatches, "growth_of_memory_is_not_hidden"),
)
LONG = (
    (shapes.LeaksBeyond2048, "later_values_move_no_output"),
    (shapes.LeaksBeyond3000, "later_values_move_no_output"),
    (shapes.OneRowLeaksBeyond2048, "long_states_are_whole"),
    (shapes.DropsAShortLastBlockOf4096, "order_of_keys_does_not_matter"),
    (shapes.IndexesKeysWith16Bits, "order_of_keys_does_not_matter"),
    (streaming.KeepsARingOf8192, "states_of_thousands_are_whole"),
)
CONTROLS = {
    "softmax": spec_of(Softmax, EXACT, NoOptions, None),
    "kernel": spec_of(Kernel, OTHER, NoOptions, None),
    "tempered": spec_of(Tempered, OTHER, NoOptions, None),
    "linear-memory": spec_of(LinearMemory, TWO_WHOLE, NoOptions, None),
}


@pytest.fixture(autouse=True)
def settings_as_they_were():
    """Keep the settings that a fault leaves behind from later tests."""
    precision, softmax = torch.get_float32_matmul_precision(), torch.nn.functional.softmax
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_flush_denormal(False)
    torch.set_default_dtype(torch.float32)
    torch.nn.functional.softmax = softmax


def with_fault(fault: type, base: type, capabilities: Capabilities) -> BackendSpec:
    return spec_of(type(f"{fault.__name__}{base.__name__}", (fault, base), {}), capabilities, NoOptions, None)


FAULTY = [
    *((with_fault(fault, Softmax, EXACT), check) for fault, check in FAULTS),
    *((with_fault(fault, Softmax, EXACT), check) for fault, check in EXPONENTIAL),
    *((with_fault(fault, Kernel, OTHER), check) for fault, check in FAULTS),
    *((with_fault(fault, Tempered, OTHER), check) for fault, check in LEARNED),
    *((with_fault(fault, LinearMemory, TWO_WHOLE), check) for fault, check in GROWING),
    *((with_fault(fault, Softmax, EXACT), check) for fault, check in LONG),
]
# One of each kind runs at every test, all of them by hand.
QUICK = {"LaterHeadsAreSharper", "WrongWhereAllAsk", "KeepsTheCallersBuffers", "CleansKeys", "FirstRowIsOff"}


def _case(spec: BackendSpec, check: str):
    quick = any(spec.name.startswith(name) for name in QUICK)
    return pytest.param(spec, check, id=spec.name, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("spec", "check"), [_case(*one) for one in FAULTY])
def test_a_fault_is_caught_by_the_check_of_its_promise(spec: BackendSpec, check: str) -> None:
    long = any(check == name for _, name in LONG)
    (record,) = ea.check(spec, only=[check], on_fail="collect", long=long)
    assert (record.outcome, record.failed) == ("broken", True), record


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("control", CONTROLS)
def test_what_has_no_fault_passes_every_check(control: str, seed: int) -> None:
    names = [name for name in check_names() if name != "compiled_it_is_the_same"]
    ea.check(CONTROLS[control], only=names, seed=seed)
