"""Plans of layers that are refused: of another model, from elsewhere, or with options beside them."""

import json

import pytest

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from efficient_attn.errors import DataError, OptionError
from efficient_attn.integrations.transformers import attach, load, save

ONE_LAYER = json.dumps(
    {"format": 1, "layers": {"h.0": {"backend": "exact", "options": {}, "max_tokens": None}}}
)


def test_a_plan_of_another_model_or_none_is_refused(encoder, tmp_path):
    file = tmp_path / "layers.json"
    model = transformers.AutoModel.from_pretrained(encoder).eval()
    for text, message in (
        ("{", "Cannot read the plan"),
        ('{"format": 7}', "not a plan of format 1"),
        ('{"format": true, "layers": {}}', "not a plan of format 1"),
        ('{"format": 1, "layers": {}}', "efficient_attn names no layer"),
        (ONE_LAYER, "belong to another model"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=message):
            attach(model, file)
    with pytest.raises(DataError, match="Cannot read the plan"):
        attach(model, tmp_path / "missing.json")
    for given in ({"window": 5}, {"max_tokens": 60}, {"seed": 3}, {"full": "window"}):
        with pytest.raises(
            OptionError, match=f"{next(iter(given))}=…: the file .* sets the backend of every"
        ):
            attach(model, tmp_path / "layers.json", **given)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"options": {"head_dim": 8}}, "No option of backend 'window' is called 'head_dim'"),
        ({"options": {"causal": True}}, "No option of backend 'window' is called 'causal'"),
        ({"options": {"window": "x"}}, "window"),
        ({"max_tokens": -5}, "max_tokens is at least 1"),
        ({"backend": "performer-positive", "options": {"num_features": 10**12}}, "is above 65536"),
        (
            {"backend": "linformer", "options": {"rank": 10**9}, "max_tokens": 10**9},
            r"needs \d+ numbers, \d+ are the",
        ),
    ],
)
def test_a_plan_from_elsewhere_is_refused_before_it_takes_memory(encoder, tmp_path, layer, message):
    model = transformers.AutoModel.from_pretrained(encoder).eval()
    one = {"backend": "window", "options": {}, "max_tokens": None, **layer}
    layers = {f"encoder.layer.{number}.attention.self": one for number in range(3)}
    file = tmp_path / "layers.json"
    file.write_text(json.dumps({"format": 1, "layers": layers}))
    with pytest.raises(DataError, match=message):
        attach(model, file)


def test_load_refuses_a_plan_that_it_would_drop_or_that_would_drop_backends(encoder, tmp_path):
    model = transformers.AutoModel.from_pretrained(encoder).eval()
    with pytest.raises(OptionError, match="plan=…: the model given by into"):
        load(encoder, into=model, plan=tmp_path / "layers.json")
    save(attach(model, "window", window=5), tmp_path / "saved")
    with pytest.raises(OptionError, match="holds a model with backends of its own"):
        load(tmp_path / "saved", plan=tmp_path / "layers.json")
