"""Backends in transformers models: what is exact equals sdpa, what cannot be honoured is refused by name."""

import copy
import logging

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5", reason="the extra [hf] is not installed")

from hf_models import (
    DECODERS,
    ENCODERS,
    MODELS,
    SIZES,
    TOKENS,
    VOCABULARY,
    bart,
    bert,
    gemma3,
    gpt2,
    inputs,
    llama,
    mistral,
    modernbert,
    ready,
)

import efficient_attn as ea
from efficient_attn.backend import Backend
from efficient_attn.errors import DtypeError, OptionError, UnknownNameError, UnsupportedError
from efficient_attn.integrations.transformers import attach, register, swapped
from efficient_attn.integrations.transformers.places import find_places

# Three layers and a head, each rounding a few times; logits are below 100.
ROUNDING = {"rtol": 1e-5, "atol": 1e-4}

register()


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, "efficient_attn")


def logits(model, batch):
    """The logits of the tokens that are not padding."""
    with torch.no_grad():
        return model(**batch).logits[batch["attention_mask"].bool()]


def gradients(model, batch):
    model.zero_grad()
    model.train()
    out = model(**batch).logits[batch["attention_mask"].bool()]
    out.square().mean().backward()
    model.eval()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def counted(monkeypatch):
    """The names and options of the backends that are called, in order."""
    calls = []
    forward = Backend.forward

    def count(self, *args, **named):
        calls.append((self.spec.name, self.options))
        return forward(self, *args, **named)

    monkeypatch.setattr(Backend, "forward", count)
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_exact_equals_sdpa_with_left_and_right_padding(name, counted):
    model, batch = MODELS[name](), inputs()
    expected = logits(model, batch)
    model.set_attn_implementation("efficient_attn.exact")
    torch.testing.assert_close(logits(model, batch), expected, **ROUNDING)
    assert len(counted) == 3


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_through_exact_equals_one_through_sdpa(name):
    model, batch = MODELS[name](), inputs()
    expected = gradients(model, batch)
    model.set_attn_implementation("efficient_attn.exact")
    found = gradients(model, batch)
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        # Gradients of one parameter differ in size by orders of magnitude: rounding is that of the largest.
        tolerance = 1e-5 * float(gradient.abs().max()) + 1e-6
        torch.testing.assert_close(found[parameter], gradient, rtol=0, atol=tolerance, msg=parameter)


@pytest.mark.parametrize("name", MODELS)
def test_attached_exact_equals_sdpa(name, counted):
    model, batch = MODELS[name](), inputs()
    expected = logits(model, batch)
    assert attach(model, "exact") is model
    torch.testing.assert_close(logits(model, batch), expected, **ROUNDING)
    assert len(counted) == 3


@pytest.mark.parametrize(
    ("name", "widths"), [("modernbert", [None, 9, None]), ("mistral", [5, 5, 5]), ("gemma3", [5, 5, None])]
)
def test_layers_that_slide_are_served_by_the_window_of_the_models_own_width(name, widths, counted):
    model, batch = MODELS[name](), inputs()
    expected = logits(model, batch)
    full = {} if all(widths) else {"full": "exact"}
    attach(model, sliding="window", **full)
    torch.testing.assert_close(logits(model, batch), expected, **ROUNDING)
    assert [getattr(options, "window", None) for _, options in counted] == widths


@pytest.mark.parametrize(
    "backend", ["exact", "exact-dense", "window", "linformer", "performer-positive", "performer-trig"]
)
@pytest.mark.parametrize("name", ENCODERS)
def test_padding_never_leaks_even_as_nan(name, backend):
    model, batch = ENCODERS[name](), inputs()
    options = {"rank": 8} if backend == "linformer" else {}
    attach(model, full=(backend, options))
    embed, mask = model.get_input_embeddings(), batch.pop("attention_mask")
    x = embed(batch["input_ids"])
    clean = logits(model, {"inputs_embeds": x, "attention_mask": mask})
    poisoned = torch.where(mask.bool()[..., None], x, torch.nan)
    found = logits(model, {"inputs_embeds": poisoned, "attention_mask": mask})
    assert found.isfinite().all()
    # Zeros in the place of keys that are not zero: only the order of rounding may differ.
    torch.testing.assert_close(found, clean, **ROUNDING)


@pytest.mark.parametrize("backend", ["exact", "window", "performer-positive", "performer-trig"])
@pytest.mark.parametrize("make", [llama, gemma3])
def test_padding_never_leaks_in_a_decoder_even_as_nan(make, backend):
    model, batch = attach(make(), full=backend), inputs()
    mask = batch["attention_mask"]
    x = model.get_input_embeddings()(batch["input_ids"])
    clean = logits(model, {"inputs_embeds": x, "attention_mask": mask})
    poisoned = torch.where(mask.bool()[..., None], x, torch.nan)
    found = logits(model, {"inputs_embeds": poisoned, "attention_mask": mask})
    torch.testing.assert_close(found, clean, **ROUNDING)


@pytest.mark.parametrize(
    ("backend", "options"),
    [("exact", {}), ("window", {}), ("linformer", {"rank": 8}), ("performer-positive", {})],
)
def test_models_in_low_precision_lose_no_more_than_twice_what_they_lose_with_sdpa(backend, options):
    model, batch = bert(), inputs()
    with swapped(model, backend, **options):
        ours = logits(model, batch)
    theirs = logits(model, batch)
    model.bfloat16()
    lost = (logits(model, batch) - theirs).norm() / theirs.norm()
    with swapped(model, backend, **options):
        found = logits(model, batch)
    assert found.dtype == torch.bfloat16
    assert (found - ours).norm() < 2 * lost * ours.norm()


@pytest.mark.parametrize("name", DECODERS)
def test_left_padding_does_not_change_what_a_decoder_says(name):
    model, batch = DECODERS[name](), inputs(left=4)
    attach(model, "exact")
    row = {key: value[:1] for key, value in batch.items()}
    positions = (row["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    padded = logits(model, {**row, "position_ids": positions})
    alone = {key: value[:, 4:] for key, value in row.items()}
    torch.testing.assert_close(padded, logits(model, alone), **ROUNDING)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_backend_that_keeps_a_draw_equals_the_same_backend_called_by_hand(name):
    model, batch, seen = MODELS[name](), inputs(), {}
    attach(model, "performer-positive", num_features=16)
    backends = [module for module in model.modules() if isinstance(module, Backend)]
    draws = [backend.core.features.projection for backend in backends]
    assert not torch.equal(draws[0], draws[1])

    def keep(module, args, named, output):
        seen["call"] = (args, named, output)

    backends[0].register_forward_hook(keep, with_kwargs=True)
    logits(model, batch)
    (q, k, v), named, output = seen["call"]
    options = {"num_features": 16, "seed": backends[0].options.seed}
    ours = ea.build("performer-positive", head_dim=8, causal=name == "llama", **options)
    torch.testing.assert_close(ours(q, k, v, **named), output)
    assert (k.shape[1], q.shape[1]) == ((2, 4) if name == "llama" else (4, 4))


def test_an_encoder_and_its_decoder_are_served_by_kind(counted):
    model, batch = bart(), {**inputs(), "decoder_input_ids": inputs()["input_ids"][:, :7]}
    with torch.no_grad():
        expected = model(**batch).logits
        with swapped(model, "exact"):
            torch.testing.assert_close(model(**batch).logits, expected, **ROUNDING)
        counted.clear()
        with swapped(model, full="window", cross="performer-positive"):
            assert model(**batch).logits.isfinite().all()
    assert [name for name, _ in counted] == ["window"] * 2 + ["window", "performer-positive"] * 2
    with pytest.raises(UnsupportedError, match=r"cannot read another sequence.*cross='exact'"):
        attach(model, "window")


@pytest.mark.parametrize("make", [bert, gpt2])
def test_cross_attention_is_known_for_what_it_is(make):
    model = make(is_decoder=True, add_cross_attention=True)
    kinds = [(place.kind, place.pattern.causal) for place in find_places(model)]
    assert kinds == [("full", True), ("cross", False)] * 3


def test_a_model_without_masks_is_served(counted):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    model = ready(transformers.ViTModel, transformers.ViTConfig(**sizes, image_size=32, patch_size=8))
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(pixels).last_hidden_state
        with swapped(model, "exact"):
            torch.testing.assert_close(model(pixels).last_hidden_state, expected, **ROUNDING)
    assert len(counted) == 1


def test_layers_can_be_named_by_number(counted):
    model = attach(bert(), {"0-1": ("window", {"window": 7}), 2: "performer-positive"})
    logits(model, inputs())
    assert [name for name, _ in counted] == ["window", "window", "performer-positive"]
    assert counted[0][1].window == 7
    counted.clear()
    logits(attach(model, {"2": "window"}), inputs())
    assert [name for name, _ in counted] == ["exact", "exact", "window"]


def test_swapped_puts_the_attention_back_also_after_an_error():
    model, batch = modernbert(), inputs()
    expected, keys, config = logits(model, batch), list(model.state_dict()), model.config.to_dict()
    with swapped(model, full=("performer-positive", {"num_features": 16})) as same:
        assert same is model
        assert not torch.allclose(logits(model, batch), expected, **ROUNDING)
    with pytest.raises(ZeroDivisionError), swapped(model, "exact"):
        raise ZeroDivisionError
    assert torch.equal(logits(model, batch), expected)
    assert (list(model.state_dict()), model.config.to_dict()) == (keys, config)
    assert model.config._attn_implementation == "sdpa"


def test_swapped_puts_back_what_was_attached():
    model, batch = attach(bert(), "performer-positive", num_features=16), inputs()
    expected, plan = logits(model, batch), copy.deepcopy(model.config.efficient_attn)
    with swapped(model, "exact"):
        assert not torch.allclose(logits(model, batch), expected, **ROUNDING)
    assert torch.equal(logits(model, batch), expected)
    assert model.config.efficient_attn == plan


def test_calibrated_backends_are_calibrated_on_a_batch(caplog):
    caplog.set_level(logging.WARNING, "efficient_attn")
    batch = inputs(left=0, right=0)
    model = attach(bert(), "performer-oprf", num_features=16)
    assert "ea.calibrate(model, **batch)" in caplog.text
    with pytest.raises(ea.CalibrationError, match=r"ea\.calibrate\(model"):
        model(**batch)
    ea.calibrate(model, **batch)
    assert logits(model, batch).isfinite().all()


def test_attaching_says_what_plain_from_pretrained_does(caplog):
    caplog.set_level(logging.WARNING, "efficient_attn")
    attach(bert(), "exact")
    assert "plain from_pretrained would run sdpa" in caplog.text


def test_exact_drops_weights_where_the_model_does_and_others_refuse():
    model, batch = bert(attention_probs_dropout_prob=0.5), inputs()
    calm = logits(attach(model, "exact"), batch)
    model.train()
    torch.manual_seed(0)
    assert not torch.allclose(logits(model, batch), calm, **ROUNDING)
    with (
        swapped(model, "window"),
        pytest.raises(UnsupportedError, match=r"attention_probs_dropout_prob=0\.0"),
    ):
        model(**batch)


def test_packed_sequences_are_refused():
    model = llama()
    positions = torch.arange(TOKENS).remainder(8)[None]
    with (
        swapped(model, "exact"),
        pytest.raises(UnsupportedError, match="several sequences packed into one row"),
    ):
        model(inputs()["input_ids"][:1], position_ids=positions, use_cache=False)


def test_attention_in_chunks_is_refused():
    from transformers.masking_utils import chunked_causal_mask_function

    from efficient_attn.integrations.transformers.masks import make_mask

    chunks = chunked_causal_mask_function(4, torch.zeros(1))
    with pytest.raises(UnsupportedError, match="attention in chunks"):
        make_mask(1, 8, 8, mask_function=chunks)


def test_a_mask_of_queries_and_keys_is_refused():
    model, batch = bert(), inputs()
    pattern = torch.ones(3, 1, TOKENS, TOKENS, dtype=torch.bool)
    with swapped(model, "exact"), pytest.raises(UnsupportedError, match=r"give a mask of real tokens"):
        model(batch["input_ids"], attention_mask=pattern)


@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_attention_outputs_are_refused(make):
    model, batch = make(), inputs()
    with swapped(model, "exact"), pytest.raises(UnsupportedError, match=r"output_attentions.*'eager'"):
        model(**batch, output_attentions=True)
    # Outside nothing is left of the refusal.
    assert model(**batch, output_attentions=True).logits.isfinite().all()


@pytest.mark.parametrize(
    ("argument", "match"),
    [("softcap", "caps the scores"), ("s_aux", "attention sinks"), ("position_bias", "position bias")],
)
def test_what_a_model_does_to_scores_is_refused(argument, match):
    from efficient_attn.integrations.transformers.attend import attention_function

    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(UnsupportedError, match=match):
        attention_function("exact")(torch.nn.Identity(), q, q, q, None, **{argument: torch.ones(1)})


def refused_models():
    from transformers import (
        Gemma2Config,
        Gemma2ForCausalLM,
        GptOssConfig,
        GptOssForCausalLM,
        T5Config,
        T5Model,
    )

    own = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
    yield ready(Gemma2ForCausalLM, Gemma2Config(**own)), "caps its scores"
    yield ready(GptOssForCausalLM, GptOssConfig(**own, num_local_experts=2)), "attention sinks"
    yield (
        ready(T5Model, T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)),
        "position bias",
    )


def test_models_that_change_their_scores_are_refused_before_anything_is_attached():
    for model, match in refused_models():
        before = model.config._attn_implementation
        with pytest.raises(UnsupportedError, match=match):
            attach(model, "exact")
        assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("make", "request_", "error", "match"),
    [
        (gpt2, {"backend": "linformer"}, UnsupportedError, "cannot be causal"),
        (bert, {"backend": "perfomer-positive"}, UnknownNameError, "Did you mean 'performer-positive'"),
        (bert, {"backend": "performer-positive", "num_feature": 3}, UnknownNameError, "num_features"),
        (bert, {}, OptionError, "Name a backend"),
        (bert, {"backend": {}}, OptionError, "Name a backend"),
        (bert, {"backend": {"2-1": "window"}}, OptionError, "numbers and ranges"),
        (bert, {"sliding": "window"}, OptionError, "no such layers; its layers are full"),
        (bert, {"backend": {"0-3": "window"}}, OptionError, "Layers are from 0 to 2"),
        (bert, {"backend": {"first": "window"}}, OptionError, "numbers and ranges"),
        (bert, {"backend": {"0-1": "window", 1: "exact"}}, OptionError, "named twice"),
        (bert, {"backend": {0: ("window", 7)}}, DtypeError, "pair"),
        (bert, {"backend": {0: "window"}, "window": 7}, OptionError, "options belong to one of them"),
        (bert, {"backend": "linformer", "sharing": "layers", "rank": 4}, UnsupportedError, "key-value"),
        (modernbert, {"backend": "performer-positive"}, UnsupportedError, "full='performer-positive'"),
        (modernbert, {"backend": "window", "window": 65}, OptionError, "slides over 9 keys"),
        (mistral, {"backend": {"1": "performer-trig"}}, UnsupportedError, "causal over 5 keys"),
    ],
)
def test_a_bad_request_is_refused_and_nothing_is_attached(make, request_, error, match):
    model = make()
    state, config = list(model.state_dict()), model.config.to_dict()
    with pytest.raises(error, match=match):
        attach(model, **request_)
    assert (list(model.state_dict()), model.config.to_dict()) == (state, config)
    assert model.config._attn_implementation == "sdpa"


def test_an_unknown_backend_is_no_attention_implementation():
    model = bert()
    with pytest.raises(ValueError, match=r"efficient_attn\.exacct"):
        model.set_attn_implementation("efficient_attn.exacct")
    assert model.config._attn_implementation == "sdpa"


ALONE = [
    "exact",
    "exact-dense",
    "linear-elu",
    "linear-taylor-1",
    "linear-taylor-2",
    "window",
    "window-clusters",
]


@pytest.mark.parametrize("backend", ALONE)
def test_what_keeps_nothing_works_by_its_name_alone(backend, counted):
    model, batch = bert(), inputs()
    model.set_attn_implementation(f"efficient_attn.{backend}")
    by_name = logits(model, batch)
    assert [name for name, _ in counted] == [backend] * 3
    torch.testing.assert_close(by_name, logits(attach(bert(), backend), batch), rtol=0, atol=0)


@pytest.mark.parametrize("backend", sorted({*ea.list_backends()} - {*ALONE}))
def test_the_name_of_a_backend_that_keeps_something_refuses_and_names_attach(backend):
    model = bert()
    model.set_attn_implementation(f"efficient_attn.{backend}")
    with pytest.raises(UnsupportedError, match=rf"attach\(model, '{backend}'\)"):
        model(**inputs())


def test_a_model_that_says_it_is_attached_and_is_not_is_told_how():
    model = bert()
    model.set_attn_implementation("efficient_attn")
    with pytest.raises(UnsupportedError, match=r"attach\(model, …\), or load\(path\)"):
        model(**inputs())


def test_a_model_that_transformers_leaves_as_it_is_is_refused(monkeypatch):
    model = bert()
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda _: False))
    state = list(model.state_dict())
    with pytest.raises(UnsupportedError, match="does not let its attention be chosen"):
        attach(model, "performer-positive")
    assert list(model.state_dict()) == state


def test_only_models_of_transformers_are_taken():
    with pytest.raises(DtypeError, match="model of transformers"):
        attach(torch.nn.Linear(2, 2), "exact")


def test_the_scale_is_the_models():
    model = gemma3()
    attach(model, "exact")
    backend = model.model.layers[0].self_attn.efficient_attn
    assert backend.problem.factor == pytest.approx(20**-0.5)


@pytest.mark.slow
def test_modernbert_at_its_full_length_slides_as_sdpa_does():
    long = {"max_position_embeddings": 8192, "local_attention": 128, "global_attn_every_n_layers": 3}
    model = modernbert(**long, hidden_size=64, num_attention_heads=1)
    ids = torch.randint(4, VOCABULARY, (1, 8192), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": (torch.arange(8192) < 8000)[None].long()}
    with torch.no_grad():
        expected = model.model(**batch).last_hidden_state[:, :8000]
        with swapped(model, sliding="window", full="exact"):
            found = model.model(**batch).last_hidden_state[:, :8000]
    # The last layer normalises, so entries are near one.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
