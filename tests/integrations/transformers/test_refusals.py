"""Requests that cannot be honoured in a transformers model are refused by name, and nothing is attached."""

import json

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from hf_models import TOKENS, attended, bart, bert, gemma2, gpt2, gpt_oss, inputs, llama, mistral, modernbert

from efficient_attn.distributed.calls import in_force
from efficient_attn.distributed.layout import Layout
from efficient_attn.errors import DataError, DtypeError, OptionError, UnknownNameError, UnsupportedError
from efficient_attn.integrations.masks import FULL
from efficient_attn.integrations.transformers import attach, distillation_loss, swapped


def on_meta():
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(llama().config)


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
        (gpt_oss, {"full": "linear-elu"}, UnsupportedError, "'sinks', which backend 'linear-elu' does not"),
        (gpt_oss, by_head("exact"), UnsupportedError, "'sinks', which backend 'by-head' does not"),
        (gemma2, {"full": "linear-elu"}, UnsupportedError, "capping', which backend 'linear-elu' does not"),
        (gemma2, by_head("block-topk"), UnsupportedError, "not support causal over 5 keys; 'window'"),
        (gemma2, {"full": ("exact", {"dropout": 0.1})}, UnsupportedError, "'exact' does .* without dropout"),
        (gemma2, by_head(("exact", {"compute_dtype": "float16"})), UnsupportedError, "and compute_dtype do"),
        (bert, {"backend": {"0-1": ("exact", {"causal": True})}}, OptionError, "causal=True is no option of"),
        (bert, {"backend": "window", "scale": 0.3}, OptionError, "scale=0.3 is no option .* leave it out"),
        (bert, {"full": ("window", {"max_tokens": 9})}, OptionError, "max_tokens: an argument of the attach"),
        (bert, by_head(("window", {"causal": True})), OptionError, "causal=True is no option of"),
        (on_meta, {"backend": "window"}, UnsupportedError, r"0\.self_attn are on meta; attach backends"),
        (fixed, {"backend": "performer-positive"}, UnsupportedError, "cannot be replaced"),
        (bert, {"backend": "layers.json", "window": 5}, OptionError, "window=…: the file .* sets the back"),
        (bert, {"backend": "layers.json", "full": "exact"}, OptionError, "full=…: the file .* sets the back"),
    ],
)
def test_a_bad_request_is_refused_and_nothing_is_attached(make, request_, error, match):
    model = make()
    state, config = list(model.state_dict()), model.config.to_dict()
    implementation = model.config._attn_implementation
    with pytest.raises(error, match=match):
        attach(model, **request_)
    assert (list(model.state_dict()), model.config.to_dict()) == (state, config)
    assert model.config._attn_implementation == implementation != "efficient_attn"


def test_what_is_no_single_model_of_transformers_with_backends_is_refused():
    two = nn.ModuleList([bert(), llama()])
    for act, error, match in (
        (lambda: attach(nn.Linear(2, 2), "exact"), DtypeError, "transformers model, or holds one, not Lin"),
        (lambda: attach(two, "exact"), UnsupportedError, "2 transformers models, BertForMaskedLM and Llama"),
        (lambda: distillation_loss(bert()), UnsupportedError, "has no backends"),
        (lambda: distillation_loss(attach(gemma2(), "exact")), UnsupportedError, "or has soft caps"),
    ):
        with pytest.raises(error, match=match):
            act()


def dropping():
    return bert(attention_probs_dropout_prob=0.5).train()


PAIRS = torch.eye(TOKENS, dtype=torch.bool).expand(3, 1, -1, -1)
PACKED = {"position_ids": torch.cat([torch.arange(n) for n in (7, 12, 5)])[None], "attention_mask": None}


@pytest.mark.parametrize(
    ("make", "call", "match"),
    [
        (bert, {"output_attentions": True}, r"output_attentions.*'eager'"),
        (llama, {"output_attentions": True}, r"output_attentions.*'eager'"),
        (bert, {"attention_mask": PAIRS}, r"a mask \[3, 1, 24, 24\] of queries and keys.*own attention"),
        (llama, {**PACKED, "use_cache": False}, "the pattern 'packed_sequence_mask_function'"),
        (dropping, {}, r"drops 0\.5 of its attention weights .* attention_dropout=0\.0"),
    ],
)
def test_a_call_that_no_backend_computes_is_refused_until_the_model_has_its_attention_back(make, call, match):
    model, arguments = make(), {**inputs(), **call}
    with swapped(model, "exact"), pytest.raises(UnsupportedError, match=match):
        model(**arguments)
    assert model(**arguments).logits.isfinite().all()


@pytest.mark.parametrize("argument", ["softcap", "s_aux", "cu_seq_lens_q", "output_attentions"])
def test_arguments_of_attention_that_no_backend_supports_are_refused_by_their_name(argument):
    q, reason = torch.randn(1, 2, 4, 8), "(', which no backend supports|: .* never materialised)"
    with pytest.raises(UnsupportedError, match=f"{argument}{reason};.* attn_implementation='eager'"):
        attended("exact", q, q, q, None, **{argument: torch.ones(1)})


def test_a_model_is_refused_on_distributed_sequences():
    model = attach(llama(), "exact")
    refused = pytest.raises(UnsupportedError, match=r"positions and masks .* inside context_parallel; call")
    with in_force(Layout("", "contiguous", 0, 2)), refused:
        model(**inputs())


def test_a_mask_of_pairs_and_a_sliding_layer_without_a_mask_are_refused():
    q, layer = torch.randn(1, 2, 4, 8), nn.Identity()
    # A learned mask is a bias, even if it is zero at first.
    learned = torch.zeros(1, 1, 4, 4, requires_grad=True)
    for mask in (torch.ones(1, 1, 4, 9).bool(), torch.ones(4, 4).bool(), learned):
        with pytest.raises(UnsupportedError, match=r"reads a mask \[.*\] of queries and keys"):
            attended("window", q, q, q, mask, pattern=FULL)
    layer.sliding_window = 3
    with pytest.raises(UnsupportedError, match="Identity has a sliding window but got no mask"):
        attended("exact", q, q, q, None, layer=layer)


def plan_text(**changes):
    """A plan for all layers of the tiny BERT."""
    layer = {"backend": "window", "options": {}, "max_tokens": None, **changes}
    layers = {f"encoder.layer.{number}.attention.self": layer for number in range(3)}
    return json.dumps({"format": 1, "layers": layers})


def of_heads(heads):
    return plan_text(backend="by-head", options={"heads": heads})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "Cannot read the plan"),
        ("{", "Cannot read the plan"),
        ("[1]", "not a plan of format 1"),
        ('{"format": true, "layers": {}}', "not a plan of format 1"),
        ('{"format": 1, "layers": {}}', "efficient_attn names no layer"),
        (plan_text(options={"causal": True}), "the options of 'window' are wrong: .*'causal'"),
        (plan_text(options={"window": "x"}), "window"),
        (plan_text(max_tokens=-5), "max_tokens is at least 1"),
        (of_heads({"0": "evil.py:f"}), "'evil.py:f', which is not registered"),
        (of_heads({"0": ("linformer", {"rank": 10**9})}), "is above 65536"),
        (of_heads({"0-99999999999": "exact"}), "by numbers and ranges"),
        (plan_text(backend="performer-positive", options={"num_features": 10**12}), "is above 65536"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_it_takes_memory(encoder, tmp_path, text, match):
    model = transformers.AutoModel.from_pretrained(encoder).eval()
    if text is not None:
        (tmp_path / "layers.json").write_text(text)
    with pytest.raises(DataError, match=match) as raised:
        attach(model, tmp_path / "layers.json")
    assert "\n" not in str(raised.value)
