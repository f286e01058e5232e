"""The advice for models of the user's own, which a function in a file makes; their times are given."""

import json

import pytest
import torch

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from integrations.hf_advice import TIMES_S

import efficient_attn as ea
from efficient_attn.errors import DataError
from efficient_attn.external import object_at
from efficient_attn.measure.error import cosine_distance

PLAN = "layers.json"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, called_models, given_times):
    """A folder with a file of models; times are those of TIMES_S."""
    monkeypatch.setitem(TIMES_S, "performer-full", 0.4)
    return tmp_path


def advise(model, backend="window", **changes):
    given = {"options": {"window": {"window": [7]}}, "min_cosine": 0.0, **changes}
    return ea.advise(model, [backend], **given)


def plan_of(results):
    """The verified plan."""
    (plan,) = [one for one in results.records if (one.case.kind, one.case.label) == ("swap", "plan")]
    return plan


def made(name, seed):
    """What a function makes after torch.manual_seed(seed)."""
    _, make = object_at(f"models.py:{name}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def distance(output, exact):
    return cosine_distance(output.flatten(), exact.flatten())


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("window", {"window": [7]}),
        ("performer-positive", {"num_features": [16], "seed": [5]}),
        ("performer-full", {"num_features": [16]}),
    ],
)
@torch.no_grad()
def test_the_plan_is_verified_on_other_inputs_and_reproduced_by_replace(backend, options, folder):
    results = advise("models.py:make_drawn", backend, options={backend: options})
    verified = plan_of(results)
    assert (verified.case.tokens, verified.case.inputs) == (20, "models.py:make_drawn, held out")
    assert "Faster from 20 tokens" in results.sentences()[0]
    assert f'ea.attach(model, "{PLAN}", example=lambda: model(*inputs))' in results.sentences()[1]
    (folder / PLAN).write_text(results.files()[PLAN])
    layers = json.loads(results.files()[PLAN])["layers"].values()
    assert len({layer["options"].get("seed", number) for number, layer in enumerate(layers)}) == 2
    model, choosing = made("make_drawn", 0)
    _, held_out = made("make_drawn", 1)
    exact = model(*held_out)
    replaced = ea.intercept.replace(model, PLAN, example=lambda: model(*choosing), strict=True)
    assert replaced.served == {"0": backend, "1": backend}
    expected = distance(model(*held_out), exact)
    assert verified.output_distance == pytest.approx(expected, abs=1e-6) and expected > 1e-4


def test_a_model_without_random_inputs_is_verified_on_the_inputs_that_choose():
    assert plan_of(advise("models.py:make_same")).case.inputs == "models.py:make_same, again"


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"backend": "window", "options": {"head_dim": 8}}, "layers.json: .*head_dim"),
        ({"backend": "by-head", "options": {"heads": {"0": "evil.py:f"}}}, "'evil.py:f', which is not reg"),
        ({"backend": "by-head", "options": {"heads": {"0": ("linformer", {"rank": 10**9})}}}, "above 65536"),
        ({"backend": "by-head", "options": {"heads": {"0-99999999999": "exact"}}}, "by numbers and ranges"),
        ({"backend": "by-head", "options": {"head": {}}}, "the options of 'by-head' are wrong: .*'head'"),
    ],
)
def test_a_foreign_plan_is_refused_in_one_line(layer, message, folder):
    (model, inputs) = made("make_drawn", 0)
    text = json.dumps({"format": 1, "layers": {"0": {"max_tokens": None, **layer}}})
    (folder / PLAN).write_text(text)
    with pytest.raises(ea.errors.AttentionError, match=message) as raised:
        ea.intercept.replace(model, PLAN, example=lambda: model(*inputs))
    assert "\n" not in str(raised.value)
    assert not any("efficient_attn" in name for name, _ in model.named_modules())


def test_a_resumed_advice_has_the_same_model(folder):
    given = {"out": folder / "run"}
    first = advise("models.py:make_drawn", **given)
    assert advise("models.py:make_drawn", **given, resume=True).sentences() == first.sentences()
    models = folder / "models.py"
    models.write_text(models.read_text().replace("2 * torch.randn", "9 * torch.randn"))
    with pytest.raises(DataError, match=r"in another environment: model\..*digest.* was"):
        advise("models.py:make_drawn", **given, resume=True)
