"""Runs that swap the attention of models: their order, records, files, interruption and resumption."""

from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import TOKENS, bert, saved, texts
from integrations.swapped_models import quality, swap, tokenized
from planned import answered_by, points_of

import efficient_attn as ea
from efficient_attn.errors import DataError
from efficient_attn.measure.record import Record, replace
from efficient_attn.measure.variants import OWN, UNIFORM_ATTENTION
from efficient_attn.studies import engine, find
from efficient_attn.studies.run_folder import Store
from efficient_attn.studies.swap.analysis import MEAN_POOL, swaps
from efficient_attn.studies.swap.view import show_quantity

pytestmark = pytest.mark.usefixtures("hasty")


@pytest.mark.parametrize(("distance", "shown"), [(0.0123, "0.9877"), (1e-6, "0.9999990"), (0.0, "1.0000000")])
def test_a_cosine_near_one_is_shown_with_more_decimals(distance, shown):
    assert show_quantity(MEAN_POOL, distance) == shown


def test_what_a_backend_cannot_serve_is_a_record_with_its_reason(decoder):
    results = swap(decoder, ["linformer"])
    record = quality(results)["linformer", None]
    assert record.status == "unsupported"
    assert record.reason.startswith("Backend 'linformer' cannot be causal.")
    assert "linformer" not in {r.case.label for r in results.records if r.case.kind == "time"}


@pytest.mark.parametrize("fails", ["forward", "build"])
def test_the_models_own_attention_is_put_back_even_after_an_error(encoder, fails):
    model = bert()
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    ids = tokenized(encoder)[0]
    before, implementation = model(ids).logits, model.config._attn_implementation

    def broken(q, k, v):
        raise RuntimeError("no such thing")

    wrong = [broken] if fails == "forward" else ["linformer"]
    options = {"linformer": {"sharing": ["layers"], "rank": [8]}} if fails == "build" else None
    results = swap((model, tokenizer), wrong, options=options)
    label = "broken" if fails == "forward" else "linformer(sharing=layers, rank=8)"
    assert quality(results)[label, None].status == ("error" if fails == "forward" else "unsupported")
    assert model.config._attn_implementation == implementation
    assert not any(isinstance(module, ea.Backend) for module in model.modules())
    assert torch.equal(model(ids).logits, before)


def test_a_window_wider_than_the_texts_and_a_rank_of_half_of_them_are_remarked_on(encoder):
    options = {"window": {"window": [TOKENS + 1, 5]}, "linformer": {"rank": [TOKENS // 2, 4]}}
    told = swap(encoder, ["window", "linformer"], options=options).sentences()
    (remark,) = (sentence for sentence in told if sentence.startswith("Approximations that save few"))
    assert f"window(window={TOKENS + 1}) (" in remark and f"linformer(rank={TOKENS // 2}) (1.00x)" in remark
    assert "window=5" not in remark and "rank=4" not in remark


def test_a_run_is_written_read_drawn_tabled_told_and_compared(encoder, tmp_path):
    options = {"window": {"window": [3, 9]}}
    results = swap(
        encoder,
        ["window", "performer-positive"],
        options=options,
        by_layer=True,
        rounds=2,
        out=tmp_path / "a",
    )
    kinds = [record.case.kind for record in results.records]
    assert (kinds.count("time"), kinds.count("memory")) == (6, 6)
    timed = [record for record in results.records if record.case.kind == "time"]
    assert all(len(r.round_sizes) == 2 and len(r.times_s) == sum(r.round_sizes) >= 4 for r in timed)
    memories = [record for record in results.records if record.case.kind == "memory"]
    assert all(r.peak_bytes > 0 for r in memories)
    assert {bool(r.parameter_bytes) for r in memories if r.case.backend == "performer-positive"} == {True}
    again = ea.read(tmp_path / "a")
    assert again.records == results.records
    about = again.environment["model"]
    assert about["class"] == "BertForMaskedLM" and set(about["texts"]) == set(texts())
    assert len(about["weights_sha256"]) == 64
    titles = [table.title for table in again.tables()]
    assert [title.partition(":")[0] for title in titles] == [
        "Attention swapped",
        "One layer swapped, cosine, mean pool",
    ]
    rows = {row[0]: row for row in again.tables()[0].rows}
    assert set(rows) == {
        OWN,
        "exact",
        UNIFORM_ATTENTION,
        "window(window=3)",
        "window(window=9)",
        "performer-positive",
    }
    found = quality(again)["window(window=3)", None]
    assert rows["window(window=3)"][1] == show_quantity(MEAN_POOL, found.mean_pool_distance)
    assert any("stays nearest to itself with" in sentence for sentence in again.sentences())
    for name in ("records.jsonl", "environment.json", "summary.csv", "report.html", "swap.png"):
        assert (tmp_path / "a" / name).is_file()
    assert len(again.plot().figure.axes) == 2
    assert len(again.to_pandas()) == len(again)
    (one,) = swaps(again.records)
    assert one.reference is not None and one.reference.times_s and one.layers == (0, 1, 2)
    assert not ea.diff(again, again).regressions
    worse = [
        replace(r, **{name: tuple(2 * x for x in getattr(r, name)) for name in ("mean_pool_distance_draws",)})
        if r.case.label == "performer-positive" and r.case.kind == "swap" and r.case.layer is None
        else r
        for r in again.records
    ]
    changed = ea.diff(again, ea.Results(worse)).comparison.changes
    assert any(c.quantity == "mean_pool_distance" and c.ratio == pytest.approx(2) for c in changed)


def test_every_length_is_a_swap_of_its_own_and_layers_filter_those_replaced_alone(encoder):
    asked = {"seq_lens": (8, TOKENS), "by_layer": True, "layers": (1,)}
    found = swaps(swap(encoder, ["window"], options={"window": {"window": [5]}}, **asked).records)
    assert [(one.case.tokens, one.layers) for one in found] == [(8, (1,)), (TOKENS, (1,))]


def test_the_most_promising_candidates_are_measured_first_and_the_predicted_duration_never_rises(
    decoder, monkeypatch
):
    now, left = 0.0, []
    plan = find("swap").plan(decoder, texts=texts(), seq_lens=TOKENS, by_layer=True)
    labels = list(dict.fromkeys(point.case.label for point in points_of(plan)))
    opened = "window-clusters(probes=8)"
    assert labels[:6] == [OWN, "exact", UNIFORM_ATTENTION, "window-clusters", opened, "window"]

    def measure(point, seconds=0.0):
        nonlocal now
        # A round warms up by two calls.
        now += 3 * point.cost if point.rounds else point.cost
        rounds = {"times_s": (1.0,), "round_sizes": (1,)} if point.rounds else {}
        return Record(case=point.case, **rounds)

    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: now))
    engine.Engine(answered_by(plan, measure), Store(), report=left.append).run()
    told = [step.remaining_s for step in left if step.done]
    assert told == sorted(told, reverse=True) and told[0] == pytest.approx(now, rel=0.1)


def test_a_run_that_was_cut_off_is_continued_and_another_model_is_refused(encoder, tmp_path):
    asked = {"options": {"window": {"window": [5]}}, "out": tmp_path / "run"}
    whole, file = swap(encoder, ["window"], **asked), tmp_path / "run" / "records.jsonl"
    kept = b"".join(file.read_bytes().splitlines(keepends=True)[:4])
    file.write_bytes(kept + b'{"schema"')
    again = swap(encoder, ["window"], resume=True, **asked)
    assert file.read_bytes().startswith(kept)
    assert {r.case.key for r in again.records} == {r.case.key for r in whole.records}
    model = bert()
    model.bert.embeddings.word_embeddings.weight.data.mul_(2)
    other = saved(model, tmp_path / encoder.name)
    with pytest.raises(DataError, match=r"model.weights_sha256 was .*, is "):
        swap(other, ["window"], resume=True, **asked)


def test_texts_are_cut_to_one_length_and_to_what_the_model_can_take(encoder):
    words = {"short": " ".join(["w1"] * 10), "long": " ".join(["w2"] * 30)}
    results = ea.swap(encoder, ["exact"], texts=words, rounds=1)
    # [CLS] and [SEP] are tokens too.
    assert {record.case.tokens for record in results.records} == {12}
    long = ea.swap(encoder, ["exact"], texts=[" ".join(["w3"] * 500)], rounds=1)
    assert {record.case.tokens for record in long.records} == {64}
