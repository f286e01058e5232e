"""Audits of the attention inside swapped models, per layer; models are tiny, random, made here."""

import math

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import TOKENS, mistral, saved, texts
from integrations.swapped_models import quality, swap, tokenized
from planned import points_of
from reference import random_qkv, reference_attention

import efficient_attn as ea
from efficient_attn.integrations.transformers import swapped
from efficient_attn.measure.error import backends_in
from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import OWN, UNIFORM_ATTENTION
from efficient_attn.studies import find
from efficient_attn.studies.swap.audited import audited, pooled
from efficient_attn.studies.swap.view import audited_cells

OPTIONS = {"window": {"window": [5]}}
LABEL = "window(window=5)"


@pytest.fixture
def every_row(monkeypatch):
    monkeypatch.setattr("efficient_attn.measure.error._FEWEST", 10_000)


def distances(model, backends, **changes):
    """{(label, layer): record} of what is compared, without times."""
    plan = find("swap").plan(model, backends, texts=texts(), seq_lens=TOKENS, **changes)
    return {
        (one.case.label, one.case.layer): one.measure() for one in points_of(plan) if one.case.kind == "swap"
    }


@pytest.mark.usefixtures("every_row")
def test_each_layer_is_audited_on_the_inputs_that_reach_it_in_the_swapped_model(encoder):
    found = distances(encoder, ["window", "exact"], options=OPTIONS, by_layer=True)
    model = transformers.AutoModelForMaskedLM.from_pretrained(encoder).eval()
    squares = torch.zeros(2, 3, dtype=torch.float64)

    def compare(layer, backend, args, named, out):
        q, k, v = (x.double() for x in args)
        exact = reference_attention(q, k, v, scale=backend.problem.factor)
        squares[:, layer] += torch.stack([(out - exact).square().sum(), exact.square().sum()])

    with torch.no_grad(), swapped(model, "window", window=5):
        for layer, backend in enumerate(backends_in(model)):
            backend.register_forward_hook(lambda *call, layer=layer: compare(layer, *call), with_kwargs=True)
        for ids in tokenized(encoder):
            model(ids)
    wanted = (squares[0] / squares[1]).sqrt().tolist()
    record = found[LABEL, None]
    assert record.audited_layers == (0, 1, 2)
    for end in ("", "_low", "_high"):
        assert getattr(record, f"attention_relative_error{end}") == pytest.approx(wanted, rel=1e-5)
    assert min(wanted) > 0.01
    # With one layer swapped alone, the first has the same inputs and later ones others.
    alone = [found[LABEL, layer] for layer in range(3)]
    assert [one.audited_layers for one in alone] == [(0,), (1,), (2,)]
    assert alone[0].attention_relative_error == pytest.approx(wanted[:1], rel=1e-5)
    assert alone[2].attention_relative_error != pytest.approx(wanted[2:], rel=1e-5)
    assert found["exact", None].audited_layers is None and found[OWN, None].audited_layers is None
    assert min(found[UNIFORM_ATTENTION, None].attention_relative_error) > 0


@pytest.mark.usefixtures("hasty")
def test_the_table_has_a_line_per_layer_and_a_column_per_backend(encoder):
    results = swap(encoder, ["window"], options=OPTIONS)
    (table,) = [one for one in results.tables() if one.title.startswith("Error of the attention of each")]
    assert table.columns == ("layer", UNIFORM_ATTENTION, LABEL)
    assert [row[0] for row in table.rows] == ["0", "1", "2"]
    record = quality(results)[LABEL, None]
    for row, value in zip(table.rows, record.attention_relative_error, strict=True):
        assert row[2].startswith(f"{value:.2g} (") and " to " in row[2]
    ends = zip(record.attention_relative_error_low, record.attention_relative_error_high, strict=True)
    # Texts of 24 tokens in 4 heads have 96 rows, of which a call draws 64.
    assert all(0 < low < high for low, high in ends)


def test_a_sliding_window_is_the_models_own_and_has_no_audit(tmp_path):
    found = distances(saved(mistral(), tmp_path), ["window"])
    assert found and all(one.audited_layers is None for one in found.values())


def test_advice_has_the_errors_of_the_layers_of_the_plan_on_held_out_texts(advised):
    (table,) = [one for one in advised.tables() if one.columns == ("layer", "plan")]
    (plan,) = (one for one in advised.records if one.case.label == "plan" and one.case.kind == "swap")
    assert plan.audited_layers == (0, 1, 2) and "held out" in plan.case.inputs
    for row, cell in zip(table.rows, audited_cells(plan).values(), strict=True):
        assert row[1] == cell


def test_calls_of_one_layer_draw_rows_of_their_own_and_are_pooled():
    backend = ea.build("window", head_dim=8, num_heads=4, window=9)
    q, k, v = random_qkv(1, 4, 4, 200, 200)
    samples = {}
    with audited([(3, backend)], samples):
        for _ in range(2):
            backend(q, k, v)
    backend(q, k, v)
    (both,) = samples.values()
    assert len(both) == 8
    # The same positions drawn twice would count as two observations.
    assert not any((one.errors == other.errors).all() for one, other in zip(both[:4], both[4:], strict=True))
    found, first = pooled(samples), pooled({3: both[:4]})
    assert found["audited_layers"] == (3,)
    widths = [
        math.log(one["attention_relative_error_high"][0] / one["attention_relative_error"][0])
        for one in (found, first)
    ]
    # Half of the variance, up to the scatter of variances of 32 rows.
    assert widths[0] / widths[1] == pytest.approx(0.5**0.5, rel=0.25)
    assert pooled({}) == pooled({0: []}) == {}


def test_damaged_records_show_the_layers_that_are_whole():
    case = Case(
        kind="swap",
        backend="b",
        label="b",
        num_heads=1,
        head_dim=1,
        tokens=1,
        dtype="d",
        device="c",
        threads=1,
    )
    audits = {"attention_relative_error": (0.1, 0.2), "attention_relative_error_low": (0.09, None)}
    record = Record(case=case, audited_layers=(0, 1), attention_relative_error_high=(0.12, 0.3), **audits)
    assert audited_cells(record) == {0: "0.1 (0.09 to 0.12)"}
    assert audited_cells(Record(case=case)) == {}
