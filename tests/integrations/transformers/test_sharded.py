"""Transformers models on distributed sequences: results of one process, and refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from integrations.hf_models import SIZES, TOKENS, bart, gemma3, inputs, llama, ready

import efficient_attn as ea
from efficient_attn.distributed.calls import in_force
from efficient_attn.distributed.layout import Layout
from efficient_attn.integrations.transformers import attach
from efficient_attn.integrations.transformers.masking import visible_in

POSITIONS = {"position_ids": torch.arange(TOKENS)[None]}


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    tests = Path(__file__).parents[2]
    command = [sys.executable, str(tests / "ranks_hf.py"), str(tmp_path_factory.mktemp("hf") / "store")]
    # Python may leave the folder of a script off its path.
    places = filter(None, (str(tests), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_models_on_two_processes_have_the_outputs_and_gradients_of_one(lines):
    # Models, masks and layouts.
    assert len([row for row in lines if row["what"] == "model"]) == 7 * 2 * 2
    # Some hundred roundings of 1.1e-16 in three layers.
    assert [row for row in lines if not max(row["errors"]) <= 1e-13] == []


@pytest.mark.slow
def test_models_decode_after_a_prefill_on_two_processes(lines):
    assert len([row for row in lines if row["what"] == "decoding"]) == 3 * 2


def refused(model, match, **batch):
    error = ea.ShapeError if "holds" in match else ea.UnsupportedError
    with in_force(Layout("", "contiguous", 0, 2)), pytest.raises(error, match=match):
        model(**batch)


def test_a_model_without_positions_of_its_own_tokens_is_refused():
    model, texts = attach(llama(), "exact"), inputs()
    refused(model, r"LlamaForCausalLM needs position_ids .*=shard\(torch\.arange", **texts)
    refused(attach(bart(), "exact"), "makes the positions of its tokens itself", **texts)
    scaled = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}
    model = attach(llama(rope_parameters=scaled), "exact")
    refused(model, "'dynamic' rotary positions, which depend on the length", **texts, **POSITIONS)


def test_masks_of_other_tokens_than_those_of_a_process_are_refused():
    model, ids = attach(llama(), "exact"), inputs()["input_ids"]
    long = torch.ones(len(ids), 2 * TOKENS)
    refused(
        model,
        f"has {2 * TOKENS} tokens and this process holds {TOKENS}",
        input_ids=ids,
        attention_mask=long,
        **POSITIONS,
    )
    pairs = torch.ones(len(ids), 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    refused(model, "is a mask .* of queries and keys", input_ids=ids, attention_mask=pairs, **POSITIONS)


def test_scores_and_masks_that_only_the_code_of_a_model_computes_are_refused():
    texts = {"input_ids": inputs()["input_ids"], "use_cache": False}
    fields = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 2.0}
    capped = attach(
        ready(transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**SIZES, **fields)), "exact"
    )
    refused(capped, "caps its scores", **texts, **POSITIONS)
    unheard = attach(gemma3(attn_logit_softcapping=5.0), "exact")
    refused(unheard, "computes its scores in its own code", **texts, **POSITIONS)
    packed = torch.cat([torch.arange(8), torch.arange(TOKENS - 8)])[None]
    model = attach(llama(), "exact")
    refused(model, "packed .* give an attention_mask of ones", **texts, position_ids=packed)


def test_a_mask_of_real_tokens_is_a_mask_on_every_process():
    """A process without padding would otherwise call the backend differently from the others."""
    from efficient_attn.integrations.transformers.masking import make_mask

    sizes = {"q_length": 3, "kv_length": 3, "attention_mask": torch.ones(1, 3)}
    assert visible_in(make_mask(1, **sizes), 1, 3, 3, causal=True).key_mask is None
    with in_force(Layout("", "contiguous", 0, 2)):
        mask = make_mask(1, **sizes)
        assert visible_in(mask, 1, 3, 3, causal=True).key_mask.tolist() == [[True] * 3]
        with pytest.raises(ea.UnsupportedError, match="computes with the mask of queries and keys"):
            mask & mask
