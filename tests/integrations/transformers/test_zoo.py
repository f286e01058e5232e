"""Exact attention in every architecture of transformers' mappings: right, or refused in words."""

import runpy
from importlib.metadata import version
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

import hf_zoo

# Models warn of their tiny sizes.
pytestmark = pytest.mark.filterwarnings("ignore")

# The committed table belongs to this version; other versions have other architectures.
MEASURED = "5.23.0"
ROWS = hf_zoo.read()


def test_the_page_of_architectures_is_fresh():
    written = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "hugging_face_models.py"))
    assert written["PAGE"].read_text(encoding="utf-8") == written["page"](), "run docs/hugging_face_models.py"


def test_the_table_has_every_architecture_and_none_is_silently_wrong():
    if version("transformers") == MEASURED:
        assert [(mapping, model) for mapping, model, _ in hf_zoo.architectures()] == list(ROWS)
    assert {verdict for verdict, _ in ROWS.values()} <= {hf_zoo.RIGHT, hf_zoo.REFUSED, hf_zoo.NOT_BUILT}


# Capped scores, sinks, biases, chunks and an index, latent attention, attention of their files alone,
# causality that only names tell, the width of a window that no mask reads.
FEW = (
    *("bert", "bloom", "deberta", "deepseek_v3", "falcon", "gemma2", "gpt_oss", "gptj", "jamba"),
    *("glm_moe_dsa", "llama4_text", "moshi", "nllb-moe", "pegasus_x", "t5", "t5gemma"),
)


@pytest.mark.parametrize("model", FEW)
def test_a_few_architectures_have_the_verdict_and_the_reason_of_the_table(model):
    entry = next(entry for entry in hf_zoo.architectures() if entry[1] == model)
    verdict, reason = hf_zoo.judged(*entry)
    if version("transformers") == MEASURED:
        assert (verdict, reason) == ROWS[entry[:2]]
    else:
        assert verdict in {hf_zoo.RIGHT, hf_zoo.REFUSED}


@pytest.mark.slow
@pytest.mark.parametrize("mapping", hf_zoo.MAPPINGS)
def test_every_architecture_has_the_verdict_of_the_table(mapping):
    differing = {}
    for entry in hf_zoo.architectures([mapping]):
        verdict, reason = hf_zoo.judged(*entry)
        changed = version("transformers") == MEASURED and verdict != ROWS[entry[:2]][0]
        if changed or verdict in (hf_zoo.WRONG, hf_zoo.ERROR):
            differing[entry[1]] = f"{verdict} ({reason})"
    assert not differing
