"""Requests that cannot be honoured in a transformers model are refused by name, and nothing is attached."""

import json

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import TOKENS, attended, bart, bert, gpt2, inputs, llama, mistral, modernbert

from efficient_attn.distributed.calls import in_force
from efficient_attn.distributed.layout import Layout
from efficient_attn.errors import DataError, DtypeError, OptionError, UnknownNameError, UnsupportedError
from efficient_attn.integrations.masks import FULL
from efficient_attn.integrations.transformers import attach, distillation_loss, swapped


def indexed():
    model = llama()
    model.config.layer_types = ["full_attention", "indexed_attention", "full_attention"]
    return model


def on_meta():
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(llama().config)


def with_indexer():
    model = llama()
    model.model.layers[1].self_attn.indexer = nn.Identity()
    return model


def fixed():
    """A model whose attention transformers does not replace."""
    model = bert()
    unable = staticmethod(lambda: False)
    model.__class__ = type("Fixed", (type(model),), {"_can_set_attn_implementation": unable})
    return model


def by_head(backend):
    return {"backend": "by-head", "heads": {"1": backend}}


@pytest.mark.parametrize(
    ("make", "request_", "error", "match"),
    [
        (gpt2, {"backend": "linformer"}, UnsupportedError, "cannot be causal"),
        (bert, {"backend": "perfomer-positive"}, UnknownNameError, "Did you mean 'performer-positive'"),
        (bert, {"backend": {}}, OptionError, "Name a backend"),
        (bert, {"sliding": "window"}, OptionError, "no such layers; its layers are full"),
        (bert, {"backend": {"0-3": "window"}}, OptionError, "Layers are from 0 to 2"),
        (bert, {"backend": {"0-1": "window", 1: "exact"}}, OptionError, "named twice"),
        (bert, {"backend": {0: ("window", 7)}}, DtypeError, "pair"),
        (bert, {"backend": {0: "window"}, "window": 7}, OptionError, "options belong to one of them"),
        (bert, {"backend": "linformer", "sharing": "layers", "rank": 4}, UnsupportedError, "key-value"),
        (bart, {"backend": "window"}, UnsupportedError, r"has no cross-attention.*cross='exact'"),
        (modernbert, {"backend": "performer-positive"}, UnsupportedError, "full='performer-positive'"),
        (modernbert, {"backend": "window", "window": 65}, OptionError, "slides over 9 keys"),
        (mistral, by_head(("window", {"window": 9})), OptionError, "attn slides over 5 keys"),
        (mistral, by_head("linear-elu"), UnsupportedError, "'linear-elu' does not support causal over 5"),
        (
            indexed,
            {"backend": "exact"},
            UnsupportedError,
            r"layers\.1\.self_attn computes with 'indexed_attention'",
        ),
        (with_indexer, {"backend": "exact"}, UnsupportedError, r"1\.self_attn computes with 'indexer'"),
        (on_meta, {"backend": "window"}, UnsupportedError, r"0\.self_attn are on meta; attach backends"),
        (fixed, {"backend": "performer-positive"}, UnsupportedError, "cannot be replaced"),
    ],
)
def test_a_bad_request_is_refused_and_nothing_is_attached(make, request_, error, match):
    model = make()
    state, config = list(model.state_dict()), model.config.to_dict()
    with pytest.raises(error, match=match):
        attach(model, **request_)
    assert (list(model.state_dict()), model.config.to_dict()) == (state, config)
    assert model.config._attn_implementation == "sdpa"


def test_modules_without_a_single_model_of_transformers_are_refused():
    for module, error, match in (
        (nn.Linear(2, 2), DtypeError, "transformers model, or holds one, not Linear"),
        (nn.ModuleList([bert(), llama()]), UnsupportedError, "2 transformers models, BertForMaskedLM and Ll"),
    ):
        with pytest.raises(error, match=match):
            attach(module, "exact")


@pytest.mark.parametrize("make", [bert, llama])
def test_attention_outputs_are_refused(make):
    model, batch = make(), inputs()
    with swapped(model, "exact"), pytest.raises(UnsupportedError, match=r"output_attentions.*'eager'"):
        model(**batch, output_attentions=True)
    # Outside nothing is left of the refusal.
    assert model(**batch, output_attentions=True).logits.isfinite().all()


def test_layers_without_backends_are_refused():
    model = bert()
    with pytest.raises(UnsupportedError, match="has no backends"):
        distillation_loss(model)
    model.set_attn_implementation("efficient_attn")
    with pytest.raises(UnsupportedError, match=r"attach\(model, …\), or load\(path\)"):
        model(**inputs())


@pytest.mark.parametrize("argument", ["cache", "softcap", "s_aux", "position_bias", "cu_seq_lens_q"])
def test_arguments_that_change_scores_or_keys_are_refused_by_their_name(argument):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(UnsupportedError, match=f"computes with '{argument}', which no backend supports"):
        attended("exact", q, q, q, None, **{argument: torch.ones(1)})


def test_a_model_is_refused_on_distributed_sequences():
    model = attach(llama(), "exact")
    refused = pytest.raises(UnsupportedError, match=r"positions and masks .* inside context_parallel; call")
    with in_force(Layout("", "contiguous", 0, 2)), refused:
        model(**inputs())


def test_calls_with_another_mask_than_of_keys_are_refused():
    ids, q, layer = inputs()["input_ids"], torch.randn(1, 2, 4, 8), nn.Identity()
    pairs = torch.eye(TOKENS, dtype=torch.bool).expand(len(ids), 1, -1, -1)
    packed = torch.cat([torch.arange(n) for n in (7, 12, 5)])[None]
    for make, call, match in (
        (bert, {"attention_mask": pairs}, r"a mask \[3, 1, 24, 24\] of queries and keys.*own attention"),
        (llama, {"position_ids": packed, "use_cache": False}, "the pattern 'packed_sequence_mask_function'"),
    ):
        with swapped(make(), "exact") as model, pytest.raises(UnsupportedError, match=match):
            model(ids, **call)
    for shape in ((1, 1, 4, 9), (4, 4)):
        with pytest.raises(UnsupportedError, match=r"reads a mask \[.*\] of queries and keys"):
            attended("window", q, q, q, torch.ones(shape, dtype=torch.bool), pattern=FULL)
    layer.sliding_window = 3
    with pytest.raises(UnsupportedError, match="Identity has a sliding window but got no mask"):
        attended("exact", q, q, q, None, layer=layer)


def plan_text(**changes):
    """A plan for all layers of the tiny BERT."""
    layer = {"backend": "window", "options": {}, "max_tokens": None, **changes}
    layers = {f"encoder.layer.{number}.attention.self": layer for number in range(3)}
    return json.dumps({"format": 1, "layers": layers})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "Cannot read the plan"),
        ("{", "Cannot read the plan"),
        ('{"format": true, "layers": {}}', "not a plan of format 1"),
        ('{"format": 1, "layers": {}}', "efficient_attn names no layer"),
        (plan_text(options={"causal": True}), "the options of 'window' are wrong: .*'causal'"),
        (plan_text(options={"window": "x"}), "window"),
        (plan_text(max_tokens=-5), "max_tokens is at least 1"),
        (plan_text(backend="performer-positive", options={"num_features": 10**12}), "is above 65536"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_it_takes_memory(encoder, tmp_path, text, match):
    model = transformers.AutoModel.from_pretrained(encoder).eval()
    if text is not None:
        (tmp_path / "layers.json").write_text(text)
    with pytest.raises(DataError, match=match):
        attach(model, tmp_path / "layers.json")


@pytest.mark.parametrize("options", [{"window": 5}, {"max_tokens": 60}, {"seed": 3}, {"full": "window"}])
def test_a_plan_sets_the_options_of_its_backends_itself(options, tmp_path):
    (name,) = options
    with pytest.raises(OptionError, match=f"{name}=…: the file .* sets the backend of every"):
        attach(bert(), tmp_path / "layers.json", **options)
