"""Models that a function in a file makes: refused, captured, swapped as the definition says, and advised."""

import json
from functools import partial

import pytest
import torch
from reference import reference_attention

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from command_line import command
from hf_advice import quality
from study_points import study

import efficient_attn as ea
from efficient_attn.errors import DataError
from efficient_attn.external import object_at
from efficient_attn.integrations.intercept.replaced import SiteBackends
from efficient_attn.measure.error import cosine_distance
from efficient_attn.measure.inputs import read_activations
from efficient_attn.measure.variants import OWN, UNIFORM_ATTENTION
from efficient_attn.studies.swap.called import called_model, output_vector

pytestmark = pytest.mark.usefixtures("called_models", "undrawn", "hasty")

PLAN = "layers.json"
BACKENDS, OPTIONS = ["exact", "window"], {"window": {"window": [5]}}
PLANNED = {"window": {"window": [7]}, "performer-full": {"num_features": [16]}}
PLANNED["performer-positive"] = {"num_features": [16], "seed": [5]}
DECIDES = "has no effect with this model, which decides its inputs"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "model 'models.py' names no function: write models.py:make_model."),
        (":make_par", "Did you mean 'make_pair'?"),
        (":attention", "is no function that returns a pair (module, inputs) with a tuple or a dict of"),
        (":make_error", "models.py:make_error fails: ValueError: no weights here (models.py, line "),
        (":make_without_attention", "code with its own softmax must call F.scaled_dot_product_attention"),
        (":make_cross", "makes no call that a backend can serve: model: its queries and keys are of two seq"),
        (":make_text", "The model returns str without a floating-point tensor"),
        (":make_infinite", "next run, or numbers that are not finite"),
        (":make_counted", "make_counted returns another output in its next run"),
        (":make_pair --seq-len 8", f"error: seq_lens {DECIDES}"),
    ],
)
def test_a_model_that_cannot_be_swapped_is_refused_in_one_line(words, message):
    code, _, err = command("swap", *f"models.py{words}".split(), "--out", "run")
    assert code == 2 and message in err
    assert err.startswith("error: ") and err.count("\n") == 1


def test_all_tensors_of_a_nested_output_are_compared_but_single_numbers():
    nested = {"loss": torch.ones(()), "a": (torch.ones(2), [torch.zeros(2, dtype=torch.float64)])}
    assert output_vector({**nested, "ids": torch.arange(4)}).tolist() == [1, 1, 0, 0]


def test_a_run_has_the_same_noise_whatever_was_drawn_before():
    pipeline = called_model("models.py:make_pipeline")
    first = pipeline.output()
    torch.rand(3)
    assert torch.equal(pipeline.output(), first)


def made(name, seed=0):
    """What a function makes after torch.manual_seed(seed)."""
    _, make = object_at(f"models.py:{name}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def pair():
    """The model and the inputs of make_pair."""
    model, inputs = made("make_pair")
    return model, inputs["x"], inputs["real"]


def test_the_activations_of_a_file_are_captured_and_measured():
    words = ["swap", "models.py:make_pair", "--save", "all.safetensors", "--backend", "exact"]
    code, out, err = command(*words, "--rounds", "1", "--out", "run")
    assert code == 0 and "a model is made" in err
    assert "Layers are call sites: 0 is masked, 1 is causal." in out + err
    assert "Saved layers 0, 1 on 12 tokens: all.safetensors." in out + err
    stored = read_activations("all.safetensors")
    assert stored.about["model"] == "models.py:make_pair"
    assert json.loads(stored.about["sites"]) == ["masked", "causal"]
    assert stored.scale == 8**-0.5 and stored.patterns == {1: "causal over all keys"}
    words = ["mse", "--inputs", "all.safetensors", "--backend", "window", "--size", "3", "-q"]
    assert command(*words)[0] == 0


@torch.no_grad()
def reference(first=None, second=None, *, uniform=False):
    """Output of make_pair's model in float64; `first` and `second` say which keys j a query i may read."""
    model, x, real = pair()
    model, x = model.double(), x.double()
    for layer, visible in ((model.masked, first), (model.causal, second)):
        q, k, v = layer.projection(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mask = {"causal": True} if layer.causal else {"key_mask": real}
        y = reference_attention(0 * q if uniform else q, k, v, scale=8**-0.5, visible=visible, **mask)
        x = x + y.transpose(1, 2).flatten(2)
    return x


def test_a_swapped_model_is_as_far_from_itself_as_the_definition_and_itself_again_afterwards():
    model, x, real = pair()
    backends, options = [*BACKENDS, "linformer"], {**OPTIONS, "linformer": {"rank": [4]}}
    results = ea.swap((model.train(), (x, real)), backends, options=options, by_layer=True, rounds=1)
    measured, exact = quality(results), reference()
    with torch.no_grad():
        torch.testing.assert_close(model(x, real).double(), exact, rtol=1e-5, atol=1e-5)
    assert not any(isinstance(part, SiteBackends) for part in model.modules())
    label = "window(window=5)"

    expected = {
        (label, None): reference(lambda i, j: abs(i - j) <= 2, lambda i, j: i - j < 5),
        (label, 0): reference(first=lambda i, j: abs(i - j) <= 2),
        (label, 1): reference(second=lambda i, j: i - j < 5),
        (UNIFORM_ATTENTION, None): reference(uniform=True),
    }
    for key, output in expected.items():
        error = float((output - exact).norm() / exact.norm())
        cosine = float(torch.cosine_similarity(output.flatten(), exact.flatten(), dim=0))
        # Sums of a few dozen float32 terms, through two layers, in errors of some percent.
        assert measured[key].output_relative_error == pytest.approx(error, rel=1e-4) and error > 0.01
        assert measured[key].output_distance == pytest.approx(1 - cosine, rel=1e-3)
    assert measured["exact", None].output_relative_error < 1e-6
    assert measured[OWN, None].output_relative_error == 0.0
    assert {record.case.inputs for record in results.records} == {"model"}
    kinds = {(record.case.kind, record.case.label) for record in results.records if record.status == "ok"}
    assert {("time", OWN), ("time", label), ("memory", label)} <= kinds
    unserved = measured["linformer(rank=4)", None]
    assert unserved.status == "unsupported"
    assert unserved.reason.startswith("causal cannot be served: Backend 'linformer' cannot")


def test_every_call_of_a_pipeline_gets_the_same_noise_and_other_masks_stay_exact():
    results = ea.swap("models.py:make_pipeline", BACKENDS, options=OPTIONS, rounds=1)
    measured = quality(results)
    assert measured[OWN, None].output_relative_error == 0.0
    assert measured["exact", None].output_relative_error < 1e-6
    assert measured["window(window=5)", None].output_distance > 1e-6
    plan = study("swap", "models.py:make_pipeline", BACKENDS)
    assert plan.notes() == [
        "Layers are call sites: 0 is model.masked, 1 is model.causal.",
        "model stays exact: its mask is no key mask and not causal.",
    ]
    assert plan.settled.model == json.loads(json.dumps(plan.settled.model))


@pytest.mark.compile
def test_a_compiled_model_is_measured_as_the_original_and_stays_compiled():
    model, *inputs = pair()
    compiled = torch.compile(model.eval(), backend="eager")
    study = partial(ea.swap, backends=BACKENDS, options=OPTIONS, rounds=1)
    first, second = (quality(study((called, tuple(inputs)))) for called in (model, compiled))
    label = "window(window=5)", None
    assert first[label].output_relative_error == second[label].output_relative_error > 0.01
    refused = pytest.raises(RuntimeError, match="fail_on_recompile")
    with refused, torch.compiler.set_stance("fail_on_recompile"):
        compiled(*inputs)


def advise(model, backend="window", **changes):
    given = {"options": {"window": {"window": [7]}}, "min_cosine": 0.0, **changes}
    return ea.advise(model, [backend], **given)


@pytest.mark.parametrize("backend", PLANNED)
@torch.no_grad()
def test_a_plan_is_verified_on_other_inputs_and_reproduced_by_replace(backend, tmp_path, given_times):
    results = advise("models.py:make_drawn", backend, options={backend: PLANNED[backend]})
    (verified,) = [r for r in results.records if (r.case.kind, r.case.label) == ("swap", "plan")]
    assert (verified.case.tokens, verified.case.inputs) == (20, "models.py:make_drawn, held out")
    assert "Faster from 20 tokens" in results.sentences()[0]
    assert f'ea.attach(model, "{PLAN}", example=lambda: model(*inputs))' in results.sentences()[1]
    (tmp_path / PLAN).write_text(results.files()[PLAN])
    layers = json.loads(results.files()[PLAN])["layers"].values()
    assert len({layer["options"].get("seed", number) for number, layer in enumerate(layers)}) == 2
    model, choosing = made("make_drawn")
    _, held_out = made("make_drawn", 1)
    exact = model(*held_out)
    replaced = ea.intercept.replace(model, PLAN, example=lambda: model(*choosing), strict=True)
    assert replaced.served == {"0": backend, "1": backend}
    expected = cosine_distance(model(*held_out).flatten(), exact.flatten())
    assert verified.output_distance == pytest.approx(expected, abs=1e-6) and expected > 1e-4


def test_a_model_without_random_inputs_is_verified_on_the_inputs_that_choose(given_times):
    inputs = {r.case.inputs for r in advise("models.py:make_same").records if r.case.label == "plan"}
    assert inputs == {"models.py:make_same, again"}


def test_a_resumed_advice_has_the_same_model(tmp_path, given_times):
    given = {"out": tmp_path / "run"}
    first = advise("models.py:make_drawn", **given)
    assert advise("models.py:make_drawn", **given, resume=True).sentences() == first.sentences()
    models = tmp_path / "models.py"
    models.write_text(models.read_text().replace("2 * torch.randn", "9 * torch.randn"))
    with pytest.raises(DataError, match=r"in another environment: model\..*digest.* was"):
        advise("models.py:make_drawn", **given, resume=True)
