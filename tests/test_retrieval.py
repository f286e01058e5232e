"""The script that compares embeddings and neighbours, against definitions written out."""

import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

RETRIEVAL = runpy.run_path(str(Path(__file__).parent.parent / "docs/retrieval.py"))


def test_agreement_is_that_of_the_chunks_with_the_largest_cosines():
    torch.manual_seed(0)
    exact = torch.randn(30, 4, 3)
    hidden = exact + 0.4 * torch.randn(30, 4, 3)
    embedded, near = [states.mean(dim=1).double() for states in (hidden, exact)], []
    for chunks in embedded:
        cosines = torch.cosine_similarity(chunks[:, None], chunks[None], dim=-1).tolist()
        # A chunk is nearest to itself.
        near.append([sorted(range(30), key=row.__getitem__)[-2:-12:-1] for row in cosines])
    cosines = torch.cosine_similarity(*embedded, dim=-1)
    shared = [len({*a} & {*b}) / 10 for a, b in zip(*near, strict=True)]
    nearest = [a[0] == b[0] for a, b in zip(*near, strict=True)]
    found = RETRIEVAL["compare"](hidden, exact)
    # float32 cosines of vectors of three entries.
    assert found["cosine"] == pytest.approx(float(cosines.mean()), abs=1e-6)
    assert found["least_cosine"] == pytest.approx(float(cosines.min()), abs=1e-6)
    assert found["shared_neighbours"] == pytest.approx(sum(shared) / 30)
    assert found["same_nearest"] == pytest.approx(sum(nearest) / 30)
    assert 0.5 < found["shared_neighbours"] < 1 and 0.2 < found["same_nearest"] < 1
    same = RETRIEVAL["compare"](exact, exact)
    assert same["shared_neighbours"] == same["same_nearest"] == 1 and same["hidden_relative_error"] == 0
