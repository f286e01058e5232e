"""The script that compares embeddings and neighbours, against definitions written out."""

import runpy
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

RETRIEVAL = runpy.run_path(str(Path(__file__).parent.parent / "docs/retrieval.py"))


def test_agreement_is_that_of_the_chunks_with_the_largest_cosines():
    torch.manual_seed(0)
    exact = torch.randn(30, 4, 3)
    hidden = exact + 0.4 * torch.randn(30, 4, 3)
    embedded = [[states.mean(dim=0) for states in one] for one in (hidden, exact)]

    def cosine(x, y):
        return float(torch.cosine_similarity(x, y, dim=0))

    near = [
        [
            sorted(set(range(30)) - {i}, key=lambda j, i=i, one=one: -cosine(one[i], one[j]))[:10]
            for i in range(30)
        ]
        for one in embedded
    ]
    cosines = [cosine(x, y) for x, y in zip(*embedded, strict=True)]
    shared = [len({*a} & {*b}) / 10 for a, b in zip(*near, strict=True)]
    nearest = [a[0] == b[0] for a, b in zip(*near, strict=True)]
    found = RETRIEVAL["compare"](hidden, exact)
    # float32 cosines of vectors of three entries.
    assert found["cosine"] == pytest.approx(sum(cosines) / 30, abs=1e-6)
    assert found["least_cosine"] == pytest.approx(min(cosines), abs=1e-6)
    assert found["shared_neighbours"] == pytest.approx(sum(shared) / 30)
    assert found["same_nearest"] == pytest.approx(sum(nearest) / 30)
    assert 0.5 < found["shared_neighbours"] < 1 and 0.2 < found["same_nearest"] < 1
    same = RETRIEVAL["compare"](exact, exact)
    assert same["shared_neighbours"] == same["same_nearest"] == 1 and same["hidden_relative_error"] == 0


def test_all_layers_are_replaced_and_restored():
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    # Large weights make attention sharp enough to tell opened clusters from summaries.
    model = transformers.BertModel(config).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.mul_(8 if weight.ndim > 1 else 1)
    ids, sizes = torch.randint(50, (12, 64)), {"window": 8, "clusters": 16}
    before = RETRIEVAL["hidden_states"](model, ids)
    chosen = [{"probes": 16}, {"probes": 1}]
    exact, opened = RETRIEVAL["measure"](model, ids, [{**sizes, **size} for size in chosen])
    assert torch.equal(RETRIEVAL["hidden_states"](model, ids), before)
    # Rounding of float32 in some ten steps of each of two layers.
    rounding = 2 * 10 * 2**-23
    assert exact["hidden_relative_error"] < rounding * 10 < opened["hidden_relative_error"]
    assert opened["least_cosine"] < opened["cosine"] < 1 and opened["operations"] < exact["operations"]
