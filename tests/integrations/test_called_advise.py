"""The advice for models of the user's own, which a function in a file makes; their times are given."""

import json

import pytest
import torch

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from integrations.hf_advice import TIMES_S

import efficient_attn as ea
from efficient_attn.errors import DataError
from efficient_attn.external import object_at
from efficient_attn.integrations.called import maker_of
from efficient_attn.measure.error import cosine_distance
from efficient_attn.studies.swap.called import inputs_of_lengths
from efficient_attn.studies.workload import Workload, settle

PLAN = "layers.json"
WORKLOAD = settle(Workload(threads=1))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, called_models, given_times):
    """A folder with a file of models; times are those of TIMES_S."""
    monkeypatch.setitem(TIMES_S, "performer-full", 0.4)
    return tmp_path


def advise(model, backend="window", **changes):
    given = {"options": {"window": {"window": [7]}}, "min_cosine": 0.0, **changes}
    return ea.advise(model, [backend], **given)


def plans(results):
    """{length: record} of the verified plans."""
    records = [one for one in results.records if (one.case.kind, one.case.label) == ("swap", "plan")]
    return {record.case.tokens: record for record in records}


def made(name, seed, **arguments):
    """What a function makes after torch.manual_seed(seed)."""
    _, make = object_at(f"models.py:{name}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make(**arguments)


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
def test_the_plan_of_every_length_is_verified_on_other_inputs_and_reproduced_by_replace(
    backend, options, folder
):
    results = advise("models.py:make_lengths", backend, options={backend: options}, seq_lens=(12, 20))
    verified = plans(results)
    assert list(verified) == [12, 20]
    assert {record.case.inputs for record in verified.values()} == {"models.py:make_lengths, held out"}
    sentence, code = results.sentences()
    assert sentence.startswith("Faster from 12 tokens") and "At 12 tokens 2.0 ± 0.2 times faster" in sentence
    assert f"{backend}(" in sentence and "in layers 0–1" in sentence
    assert f'efficient_attn.intercept.replace(model, "{PLAN}", example=' in code
    (folder / PLAN).write_text(results.files()[PLAN])
    layers = json.loads(results.files()[PLAN])["layers"].values()
    assert len({layer["options"].get("seed", number) for number, layer in enumerate(layers)}) == 2
    model, choosing = made("make_lengths", 0, seq_len=20)
    _, held_out = made("make_lengths", 1, seq_len=20)
    exact = model(*held_out)
    replaced = ea.intercept.replace(model, PLAN, example=lambda: model(*choosing), strict=True)
    assert replaced.served == {"0": backend, "1": backend}
    expected = distance(model(*held_out), exact)
    assert verified[20].output_distance == pytest.approx(expected, abs=1e-6) and expected > 1e-4


def test_a_model_without_lengths_is_verified_on_the_inputs_that_choose_and_says_so():
    plan = ea.studies.find("advise").plan("models.py:make_same", ["window"])
    note = "has the same output at 10 tokens whatever the random numbers are"
    assert any(note in line for line in plan.notes)
    assert plans(advise("models.py:make_same"))[10].case.inputs == "models.py:make_same, again"


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"backend": "windoww", "options": {}}, "names the backend 'windoww', which is not registered"),
        ({"backend": "window", "options": {"head_dim": 8}}, "layers.json, 0: .*head_dim"),
        ({"backend": "window-clusters", "options": {"clusters": 10**9}}, "is above 65536"),
        ({"backend": "by-head", "options": {"heads": {"0": "evil.py:f"}}}, "'evil.py:f', which is not reg"),
        ({"backend": "by-head", "options": {"heads": {"0": ("linformer", {"rank": 10**9})}}}, "above 65536"),
        ({"backend": "by-head", "options": {"heads": {"0-99999999999": "exact"}}}, "by numbers and ranges"),
        ({"backend": "by-head", "options": {"heads": 3}}, "the options of 'by-head' are none: heads maps"),
        ({"backend": "by-head", "options": {"head": {}}}, "the options of 'by-head' are none: .*'head'"),
    ],
)
def test_a_foreign_plan_is_refused_in_one_line(layer, message, folder):
    (model, inputs) = made("make_lengths", 0)
    text = json.dumps({"format": 1, "layers": {"0": {"max_tokens": None, **layer}}})
    (folder / PLAN).write_text(text)
    with pytest.raises(ea.errors.AttentionError, match=message) as raised:
        ea.intercept.replace(model, PLAN, example=lambda: model(*inputs))
    assert "\n" not in str(raised.value)
    assert not any("efficient_attn" in name for name, _ in model.named_modules())


def test_the_model_of_all_lengths_is_that_of_the_longest_and_repeated_ones_are_noted():
    pairs, notes = inputs_of_lengths(maker_of("models.py:make_sized"), WORKLOAD, (12, 16, 24))
    assert [choosing.shared["tokens"] for choosing, _ in pairs] == [12, 16]
    assert len({subject.model for pair in pairs for subject in pair}) == 1
    assert pairs[0][0].model.size == 24
    assert notes == ["Not measured at 24 tokens: the first attention has 16, as before."]


def test_a_resumed_advice_has_the_same_model(folder):
    given = {"seq_lens": (12,), "out": folder / "run"}
    first = advise("models.py:make_lengths", **given)
    assert advise("models.py:make_lengths", **given, resume=True).sentences() == first.sentences()
    models = folder / "models.py"
    models.write_text(models.read_text().replace("2 * torch.randn", "9 * torch.randn"))
    with pytest.raises(DataError, match=r"in another environment: model\..*digest.* was"):
        advise("models.py:make_lengths", **given, resume=True)
