"""Heads with a sliding window: their rank, the plan that keeps its targets, and recall of copies."""

import json

import pytest
import torch

pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from hf_advice import TIMES_S, timed
from hf_models import VOCABULARY, llama, mistral, opt, saved, texts

import efficient_attn as ea
from efficient_attn.integrations.transformers import attach, swapped
from efficient_attn.integrations.transformers.loading import Opened, open_model, token_ids
from efficient_attn.integrations.transformers.swapping import sites_of
from efficient_attn.measure import copies
from efficient_attn.measure.copies import FEWEST_TOKENS, copies_begin, with_copies
from efficient_attn.measure.record import replace
from efficient_attn.measure.variants import OWN, UNIFORM_ATTENTION
from efficient_attn.registry import Choice
from efficient_attn.runs.progress import Durations
from efficient_attn.studies.advise.heads import head_scores
from efficient_attn.studies.advise.record import AdviseRecord
from efficient_attn.studies.swap.model import ranks_heads

TOKENS = FEWEST_TOKENS + 100
WINDOW = ("window", {"window": 16, "global_tokens": 1})
LOOSE = {"seq_lens": (TOKENS,), "max_kl": 100.0, "max_loss": 100.0, "min_recall": 0.0}
TEXTS = texts(2, words=2 * TOKENS)


def text(seed=0, tokens=TOKENS):
    return torch.randint(4, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))


def test_the_end_of_a_text_repeats_passages_from_further_back_than_any_window():
    ids = torch.arange(TOKENS)[None]
    copied = with_copies(ids, seed=0)
    begin = copies_begin(TOKENS)
    assert torch.equal(copied[:, :begin], ids[:, :begin]) and copied.shape == ids.shape
    passages = copied[0, begin:].view(copies.PASSAGES, copies.LENGTH)
    starts, ordered = passages[:, 0], passages[:, 0].sort().values
    assert torch.equal(passages, starts[:, None] + torch.arange(copies.LENGTH))
    assert (starts + copies.LENGTH <= begin - copies.DISTANCE).all()
    assert not torch.equal(starts, ordered) and (ordered.diff() >= copies.LENGTH).all()
    assert not torch.equal(starts, with_copies(ids, seed=1)[0, begin :: copies.LENGTH])
    short = ids[:, : FEWEST_TOKENS - 1]
    assert with_copies(short, seed=0) is short and copies_begin(FEWEST_TOKENS - 1) == FEWEST_TOKENS - 1


def test_recall_counts_the_tokens_of_copies_that_are_predicted_right():
    ids = with_copies(text(), seed=0)[0]
    begin, right = copies_begin(TOKENS), torch.rand(TOKENS, generator=torch.Generator().manual_seed(1)) < 0.6
    following = torch.cat([ids[1:], ids[:1]])

    def predicting(tokens):
        return lambda rows: torch.nn.functional.one_hot(tokens[rows], VOCABULARY).float()

    some_right = predicting(torch.where(right, following, (following + 1) % VOCABULARY))
    starts = begin + torch.arange(copies.PASSAGES)[:, None] * copies.LENGTH
    shares = right[starts + torch.arange(copies.FIRST, copies.LENGTH) - 1].double().mean(dim=1)
    assert copies.copy_recall(some_right, predicting(following), ids) == {
        "copy_recall": pytest.approx(shares.mean().item()),
        "copy_recall_exact": 1.0,
        "copy_recall_error": pytest.approx(shares.std().item() / 4),
    }


# Logits of OPT are computed at once for all tokens.
@pytest.mark.parametrize(("make", "projection", "kv_heads"), [(llama, "o_proj", 2), (opt, "out_proj", 4)])
def test_scores_sum_squares_of_gradient_times_change_of_a_key_head(make, projection, kv_heads):
    model = make(max_position_embeddings=512).double()
    # Several blocks of logits.
    sites, texts = sites_of(model), [text(seed, 300) for seed in (0, 1)]
    scores = head_scores(model, sites, texts, Choice(*WINDOW))
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())
    expected = torch.zeros(3, kv_heads, dtype=torch.float64)
    outputs = {}
    for site in sites.swapped:
        linear = getattr(site.module, projection)
        linear.register_forward_pre_hook(lambda m, args, layer=site.layer: keep(layer, args[0]))

    def keep(layer, out):
        outputs.setdefault(layer, []).append(out)
        out.retain_grad()

    for ids in texts:
        outputs.clear()
        logits = model(ids).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, ids[0, 1:]).backward()
        for layer in range(3):
            # Inputs of a layer are exact where no earlier one has changed.
            with swapped(model, {layer: WINDOW}):
                model(ids)
            exact, changed = outputs[layer][0], outputs[layer][-1]
            products = exact.grad * (changed - exact).detach()
            expected[layer] += products.view(300, kv_heads, -1).sum(dim=2).square().sum(dim=0)
    assert scores == {layer: pytest.approx(row.tolist(), rel=1e-6) for layer, row in enumerate(expected)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(llama(max_position_embeddings=4096), tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A decoder of one layer with two key heads."""
    model = llama(max_position_embeddings=4096, num_hidden_layers=1)
    return saved(model, tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def advised(small):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("efficient_attn.studies.swap.measure.cost", timed)
        patch.setattr("efficient_attn.studies.advise.precision.bfloat16_instructions", lambda: "none")
        return ea.advise(small, texts=TEXTS, **LOOSE)


def test_plans_are_made_and_timed_in_the_faster_precision_and_heads_ranked_as_loaded(small, monkeypatch):
    def in_dtype(case, variant, subject, *, seconds):
        record = timed(case, variant, subject, seconds=seconds)
        return replace(record, times_s=(record.times_s[0] / (3 if case.dtype == "bfloat16" else 1),))

    monkeypatch.setattr("efficient_attn.studies.swap.measure.cost", in_dtype)
    monkeypatch.setattr("efficient_attn.studies.advise.precision.bfloat16_instructions", lambda: "amx_bf16")
    results = ea.advise(small, texts=TEXTS, **LOOSE)
    first = [(r.case.label, r.case.dtype, len(r.round_sizes or ())) for r in results.records[:2]]
    assert first == [("attention in bfloat16", "float32", 0), ("model in bfloat16", "bfloat16", 0)]
    by_label = {(r.case.label, r.case.kind): r for r in results.records}
    assert by_label[OWN, "heads"].case.dtype == "float32"
    for label, kind in {**dict.fromkeys(("plan", "plan 1"), "swap"), "model in bfloat16": "bound"}.items():
        assert by_label[label, kind].case.dtype == "bfloat16"
    # Half of the time of the model in bfloat16, a sixth of the model as loaded.
    plan, precision, code = results.sentences()
    assert "model in bfloat16 3.00 ± 0 times faster" in precision
    assert precision.endswith('To load it: LlamaForCausalLM.from_pretrained("small0", dtype=torch.bfloat16)')
    assert "over the model in bfloat16 2.00 ± 0 times faster" in plan and "ea.attach" in code
    # The loss in bfloat16 is over the model as loaded, and that of a model which was loaded in bfloat16.
    loaded = open_model(small), open_model(small, dtype="bfloat16")
    ids = with_copies(token_ids(loaded[0], list(TEXTS.values())[1], most=TOKENS), seed=0)
    with torch.no_grad():
        log_p, log_q = (x.model(ids).logits[0].double().log_softmax(dim=-1) for x in loaded)
    begin = copies_begin(TOKENS)
    kl = (log_p.exp() * (log_p - log_q))[:begin].sum(dim=-1).mean()
    assert by_label["model in bfloat16", "swap"].next_token_kl == pytest.approx(kl.item(), rel=1e-6)
    assert kl > 0


def test_a_plan_is_timed_until_it_is_decided_against_the_fastest_model(small, given_times, monkeypatch):
    factors = iter([0.7, 1.4] * 16)

    def noisy(case, variant, subject, *, seconds):
        record = timed(case, variant, subject, seconds=seconds)
        factor = next(factors) if (case.label, case.kind) == ("plan", "time") else 1.0
        return replace(record, times_s=(factor * record.times_s[0] * (3 if case.dtype == "float32" else 1),))

    monkeypatch.setattr("efficient_attn.studies.swap.measure.cost", noisy)
    monkeypatch.setattr("efficient_attn.studies.advise.precision.bfloat16_instructions", lambda: "amx_bf16")
    results = ea.advise(small, texts=TEXTS, **LOOSE)
    rounds = {r.case.label: len(r.round_sizes) for r in results.records if r.case.kind == "time"}
    assert rounds == {OWN: 4, "attention in bfloat16": 4, "model in bfloat16": 16, "plan": 16}
    assert "over the model in bfloat16 2.0" in results.sentences()[0]


def test_plans_are_on_top_of_attention_in_bfloat16_where_that_is_fastest(
    small, given_times, monkeypatch, tmp_path
):
    def halved(case, variant, subject, *, seconds):
        record = timed(case, variant, subject, seconds=seconds)
        factor = 0.6 if case.label == "attention in bfloat16" else 1.0
        return replace(record, times_s=(factor * record.times_s[0],))

    monkeypatch.setattr("efficient_attn.studies.swap.measure.cost", halved)
    monkeypatch.setattr("efficient_attn.studies.advise.precision.bfloat16_instructions", lambda: "amx_bf16")
    results = ea.advise(small, texts=TEXTS, **LOOSE)
    plan, precision, _ = results.sentences()
    assert 'ea.attach(model, "exact", compute_dtype="bfloat16")' in precision
    assert "over the attention in bfloat16 1.20 ± 0 times faster" in plan
    (tmp_path / "layers.json").write_text(results.files()["layers.json"])
    (record,) = [r for r in results.records if (r.case.kind, r.case.label) == ("swap", "plan")]
    assert record.attached_layers.count('"compute_dtype": "bfloat16"') == 2
    opened = open_model(small)
    ids = with_copies(token_ids(opened, list(TEXTS.values())[1], most=TOKENS), seed=0)
    with torch.no_grad():
        exact = opened.model(ids).logits[0].double().log_softmax(dim=-1)
        attach(opened.model, tmp_path / "layers.json")
        attached = opened.model(ids).logits[0].double().log_softmax(dim=-1)
    kl = (exact.exp() * (exact - attached))[: copies_begin(TOKENS)].sum(dim=-1).mean()
    assert record.next_token_kl == pytest.approx(kl.item(), rel=1e-6) and kl > 0


def test_a_precision_beyond_the_target_or_slower_is_not_used(small, given_times, monkeypatch):
    monkeypatch.setattr("efficient_attn.studies.advise.precision.bfloat16_instructions", lambda: "amx_bf16")
    same = ea.advise(small, texts=TEXTS, **LOOSE)
    assert "model in bfloat16 as fast within 10 %" in same.sentences()[1]
    beyond = ea.advise(small, texts=TEXTS, **{**LOOSE, "max_kl": 0.0})
    assert "model in bfloat16 not within the target, KL divergence" in beyond.sentences()[1]
    for results in (same, beyond):
        lower = {record.case.label for record in results.records if record.case.dtype == "bfloat16"}
        assert lower == {"model in bfloat16"} and "dtype=torch.bfloat16" not in results.sentences()[1]


def test_advise_ranks_heads_counts_them_and_verifies_the_plan(advised):
    (rank,) = [record for record in advised.records if record.case.kind == "heads"]
    assert {(layer, head) for layer, head, _ in json.loads(rank.head_scores)} == {(0, 0), (0, 1)}
    plans = [record for record in advised.records if record.streaming_heads]
    assert [(plan.case.label, plan.streaming_heads, plan.key_heads) for plan in plans] == [
        (label, 1, 2) for label in ("plan 1", "plan", "random heads")
    ]
    assert plans[1].case.inputs.endswith("held out")
    (planted,) = [record for record in advised.records if record.case.kind == "planted"]
    assert planted.numbers == 16 * 13 and planted.status == "ok"
    text = "(4 first + 512 last tokens) in 1 of 2 key/value heads: loss"
    assert text in advised.sentences()[0]


ORDER = [(layer, head) for layer in range(3) for head in range(2)]


@pytest.fixture
def planned(monkeypatch, given_times):
    """Scores that rank heads in ORDER, and heads that may stream."""
    scores = {layer: [float(ORDER.index((layer, head))) for head in range(2)] for layer in range(3)}
    monkeypatch.setattr("efficient_attn.studies.advise.heads.head_scores", lambda *arguments: scores)
    streamable = {}

    def distance(case, *arguments, **named):
        layers = json.loads(case.options.get("layers", "{}"))
        heads = {(int(layer), head) for layer, numbers in layers.items() for head in numbers}
        lost = not heads <= {*streamable.get(case.options.get("window"), ())}
        recall = {"copy_recall": 0.9, "copy_recall_exact": 0.9, "copy_recall_error": 0.0}
        loss = {"loss_difference": 0.0, "loss_difference_error": 0.0, "next_token_kl": float(lost)}
        return AdviseRecord(case=case, **loss, **recall)

    monkeypatch.setattr("efficient_attn.studies.swap.measure.distance", distance)
    answers = "efficient_attn.studies.swap.model.TextSubject.right_answers"
    monkeypatch.setattr(answers, lambda subject: [True, False])
    return streamable


@pytest.mark.parametrize(
    ("streamable", "window", "tried"),
    [
        ({512: ORDER[:3]}, 512, [2, 4, 3]),
        # Less than a third streams: a longer window, of which two heads save more than one.
        ({512: ORDER[:1], 1024: ORDER[:2]}, 1024, [2, 1, 2, 4, 3]),
        ({512: ORDER[:1], 1024: ORDER[:1]}, 512, [2, 1, 2, 1]),
    ],
)
def test_heads_are_counted_by_bisection_and_too_few_keep_more_keys(
    folder, planned, streamable, window, tried
):
    planned |= streamable
    results = ea.advise(folder, texts=TEXTS, seq_lens=(TOKENS,))
    plans = [record for record in results.records if record.case.label.startswith("plan ")]
    assert [plan.streaming_heads for plan in plans] == tried
    ranks = [r.case.options["window"] for r in results.records if r.case.kind == "heads"]
    assert ranks == [*streamable]
    (final,) = [r for r in results.records if (r.case.kind, r.case.label) == ("swap", "plan")]
    chosen = json.loads(final.case.options["layers"])
    heads = sorted((int(layer), head) for layer, numbers in chosen.items() for head in numbers)
    assert heads == streamable[window] and f'"window": {window}' in final.attached_layers
    part = f"(4 first + {window} last tokens) in {len(heads)} of 6 key/value heads: loss"
    assert f"2.00 ± 0 times faster, with a sliding window {part}" in results.sentences()[0]


def test_a_rank_that_fails_gives_no_plan(folder, planned, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no gradient")

    monkeypatch.setattr("efficient_attn.studies.advise.heads.head_scores", broken)
    results = ea.advise(folder, texts=TEXTS, seq_lens=(TOKENS,))
    assert [record.status for record in results.records if record.case.kind == "heads"] == ["error"]
    assert not any(record.streaming_heads for record in results.records)


def test_the_file_of_a_plan_is_attached_as_the_plan_was_measured(small, advised, tmp_path):
    (plan,) = [r for r in advised.records if (r.case.kind, r.case.label) == ("swap", "plan")]
    (tmp_path / "layers.json").write_text(plan.attached_layers)
    opened = open_model(small)
    ids = with_copies(token_ids(opened, list(TEXTS.values())[1], most=TOKENS), seed=0)
    with torch.no_grad():
        exact = opened.model(ids).logits[0].double()
        attach(opened.model, tmp_path / "layers.json")
        attached = opened.model(ids).logits[0].double()
    begin = copies_begin(TOKENS)
    log_p, log_q = (x[:begin].log_softmax(dim=-1) for x in (exact, attached))
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1).mean()
    assert plan.next_token_kl == pytest.approx(kl.item(), rel=1e-4) and kl > 1e-6


def test_a_decoder_whose_layers_all_slide_has_no_heads_to_rank():
    assert [ranks_heads(Opened(make(), None, {})) for make in (llama, mistral)] == [True, False]


def test_heads_are_ranked_only_where_uniform_attention_is_faster(small, advised, given_times, monkeypatch):
    assert [record.case.kind for record in advised.records[:4]] == ["swap", "bound", "bound", "heads"]
    # One round bounds the gain; the plan, verified before, is timed in all rounds.
    rounds = [len(record.round_sizes) for record in advised.records if record.times_s]
    kinds = [record.case.kind for record in advised.records if record.case.label != "random heads"]
    assert rounds == [1, 1, 4, 4] and kinds.index("time") > max(n for n, x in enumerate(kinds) if x == "swap")
    monkeypatch.setitem(TIMES_S, UNIFORM_ATTENTION, 1.0)
    results = ea.advise(small, texts=TEXTS, **LOOSE)
    assert [record.case.kind for record in results.records] == ["swap", "bound", "bound"]
    (sentence,) = results.sentences()
    assert "little to gain; attention takes 0 % of the time" in sentence


def test_a_trial_beyond_the_budget_leaves_the_plan_that_is_known(folder, planned, monkeypatch):
    planned[512] = ORDER[:3]
    next_s = Durations.next_s
    labels = ("plan 2", "plan 3")
    monkeypatch.setattr(
        Durations, "next_s", lambda self, point: 1e9 if point.case.label in labels else next_s(self, point)
    )
    results = ea.advise(folder, texts=TEXTS, seq_lens=(TOKENS,), budget_s=600.0)
    plans = {r.case.label: r.streaming_heads for r in results.records if r.streaming_heads}
    assert plans["plan 1"] == plans["plan"] == 2 and "layers.json" in results.files()
