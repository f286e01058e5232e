"""Faults that published code has, each caught by the check that is named for the promise it breaks."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import broken
import pytest
from torch import nn
from twins import Positive, Softmax, Window, WindowOptions

import efficient_attn as ea
from efficient_attn.backends.linear_attention import RandomFeatureOptions
from efficient_attn.distributed.calls import EXCHANGES, Exchange
from efficient_attn.registry import BackendSpec, Capabilities, NoOptions
from efficient_attn.testing import check_names


class Pair(NamedTuple):
    """A broken backend, its twin, and the check that tells them apart."""

    broken: BackendSpec
    twin: BackendSpec
    check: str


EXACT = Capabilities(
    causal=True, exact=True, second_derivatives=True, sharded="keys", time_growth=2, memory_growth=2
)
RANDOM = Capabilities(causal=True, second_derivatives=True, time_growth=2, memory_growth=2)
LOCAL = Capabilities(causal=True, cross=False, second_derivatives=True, time_growth=2, memory_growth=2)
LINEAR = Capabilities(causal=True, exact=True, second_derivatives=True, time_growth=2)
ONCE = Capabilities(causal=True, time_growth=2, memory_growth=2, exact=True)


def spec_of(core: Callable[..., nn.Module], capabilities: Capabilities, options: type, size: str | None):
    name = getattr(core, "__name__", "twin")
    return BackendSpec(
        name=name,
        summary=f"{name}, a backend of the tests.",
        options_type=options,
        size_option=size,
        capabilities=capabilities,
        builder=core,
    )


def _pair(core: type[Softmax], check: str, capabilities: Capabilities | None = None) -> Pair:
    if issubclass(core, Positive):
        kind: tuple = (RANDOM, RandomFeatureOptions, "num_features")
        twin: type[Softmax] = Positive
    elif core is broken.WindowOffByOne:
        kind, twin = (LOCAL, WindowOptions, "window"), Window
    else:
        kind, twin = (EXACT, NoOptions, None), Softmax
    if hasattr(core, "exchange"):
        capabilities = replace(EXACT, sharded=core.__name__)
    return Pair(spec_of(core, capabilities or kind[0], *kind[1:]), spec_of(twin, *kind), check)


PAIRS = (
    _pair(broken.MasksValuesOnly, "amount_of_padding_does_not_matter"),
    _pair(broken.MultipliesByTheMask, "padding_contents_change_no_bit"),
    _pair(broken.ReadsEverythingWhereItIsBlind, "blind_queries_give_zeros"),
    _pair(broken.ForgetsTheMaskWhenExtending, "extend_honours_its_mask"),
    _pair(broken.PadsWithoutAMask, "weights_of_a_row_sum_to_one"),
    _pair(broken.ReadsItsOwnRank, "parts_on_several_ranks_are_the_whole"),
    _pair(broken.JoinsRanksInTheirOrder, "parts_on_several_ranks_are_the_whole"),
    _pair(broken.MultipliesGradientsByTheRanks, "parts_on_several_ranks_are_the_whole"),
    _pair(broken.IgnoresCausality, "no_output_depends_on_a_later_token"),
    _pair(broken.AlignsQueriesWithTheFirstKeys, "queries_are_the_last_positions"),
    _pair(broken.MixesThenMasks, "no_output_depends_on_a_later_token"),
    _pair(broken.KnowsTheLargestFutureKey, "later_values_move_no_output"),
    _pair(broken.SumsOverTheWrongAxis, "more_features_come_nearer_to_softmax"),
    _pair(broken.ScalesTwice, "scale_is_a_factor_on_the_scores"),
    _pair(broken.ClampsTheDenominator, "weights_of_a_row_sum_to_one"),
    _pair(broken.SumsInHalfPrecision, "long_sums_do_not_stall_in_half_precision"),
    _pair(broken.ScoresInHalfPrecision, "large_inputs_stay_finite"),
    _pair(broken.RepeatsHeadsInTurn, "grouped_queries_are_repeated_heads"),
    _pair(broken.WindowOffByOne, "a_window_reads_its_neighbourhood"),
    _pair(broken.DrawsWithoutTheSigns, "the_draw_has_no_preferred_direction"),
    _pair(broken.RowsOfTheWrongLength, "more_features_come_nearer_to_softmax"),
    _pair(broken.RedrawsEveryTime, "the_same_call_gives_the_same_bits"),
    _pair(broken.KeepsItsDrawToItself, "a_saved_state_brings_the_output_back"),
    _pair(broken.SeedsFromTheBatch, "batch_mates_do_not_matter"),
    _pair(broken.IgnoresItsSize, "the_size_matters"),
    _pair(broken.WritesToItsInputs, "inputs_are_not_written_to"),
    _pair(broken.UsesTheGlobalGenerator, "nothing_global_is_touched"),
    _pair(broken.LosesItsSecondDerivatives, "second_derivatives_are_right_or_refused", ONCE),
    _pair(broken.HoldsAllScores, "memory_grows_as_declared", LINEAR),
)

NAMED = [pytest.param(pair, id=f"{pair.broken.name}-{pair.check}") for pair in PAIRS]


def outcome(spec, check: str) -> str:
    (record,) = ea.check(spec, only=[check], on_fail="collect")
    return record.outcome


@pytest.mark.parametrize("pair", NAMED)
def test_a_fault_is_caught_by_the_check_of_its_promise(pair: Pair, monkeypatch) -> None:
    exchange = getattr(pair.broken.builder, "exchange", None)
    monkeypatch.setitem(EXCHANGES, pair.broken.name, Exchange(exchange))
    (record,) = ea.check(pair.broken, only=[pair.check], on_fail="collect")
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
    ea.check(twin, only=[name for name in check_names() if name != "compiled_it_is_the_same"])
