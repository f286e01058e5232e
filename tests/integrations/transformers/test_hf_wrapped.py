"""Models inside objects of other libraries: adapters and sentence encoders keep their backends."""

import json
import logging

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import bert, inputs, llama, logits, saved
from safetensors.torch import save_file

from efficient_attn.errors import DataError, DtypeError, OptionError, UnsupportedError
from efficient_attn.integrations.transformers import StateCache, attach, load, save, swapped

SIZE = {"num_features": 16}

WITHOUT_ENCODERS = "sentence_transformers is not installed; no extra installs it"


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, "efficient_attn")


class Adapter(nn.Module):
    """A module around a model that saves a part of it, as PEFT does."""

    def __init__(self, model):
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, **batch):
        return self.base_model["model"](**batch)

    def save_pretrained(self, folder):
        folder.mkdir(exist_ok=True)
        save_file({"scale": self.scale.data}, folder / "adapter_model.safetensors")


def test_a_model_inside_a_module_is_attached_and_put_back():
    wrapped, batch = Adapter(bert()), inputs()
    expected = logits(wrapped, batch)
    with swapped(wrapped, "performer-positive", **SIZE) as same:
        assert same is wrapped
        approximated = logits(wrapped, batch)
    assert not torch.allclose(approximated, expected)
    assert torch.equal(logits(wrapped, batch), expected)
    assert attach(wrapped, "performer-positive", **SIZE) is wrapped
    assert torch.equal(logits(wrapped, batch), approximated)
    assert StateCache(attach(Adapter(llama()), "exact")).layers


def test_a_module_without_a_model_and_one_with_two_are_refused():
    with pytest.raises(DtypeError, match="transformers model, or holds one, not Linear"):
        attach(nn.Linear(2, 2), "exact")
    with pytest.raises(UnsupportedError, match="holds 2 transformers models, BertForMaskedLM and Llama"):
        attach(nn.ModuleList([bert(), llama()]), "exact")


def test_backends_are_saved_next_to_an_adapter_and_loaded_into_a_new_one(tmp_path):
    batch = inputs()
    first = attach(Adapter(bert()), "linformer", rank=4, sharing="key-value", seed=3)
    expected = logits(first, batch)
    save(first, tmp_path / "saved")
    assert (tmp_path / "saved" / "adapter_model.safetensors").is_file()
    again = Adapter(bert())
    assert load(tmp_path / "saved", into=again) is again
    assert torch.equal(logits(again, batch), expected)


def test_a_whole_model_is_saved_in_its_own_form(tmp_path):
    model, batch = attach(bert(), "performer-positive", **SIZE), inputs()
    save(model, tmp_path)
    assert not (tmp_path / "efficient_attn.json").exists()
    assert torch.equal(logits(load(tmp_path), batch), logits(model, batch))
    assert torch.equal(logits(load(tmp_path, into=bert()), batch), logits(model, batch))


def test_an_adapter_keeps_its_backends_in_the_folder_of_its_base_model(tmp_path):
    bert().save_pretrained(tmp_path)
    batch = inputs()
    first = attach(Adapter(bert()), "performer-positive", **SIZE, seed=3)
    save(first, tmp_path)
    assert torch.equal(logits(load(tmp_path, into=Adapter(bert())), batch), logits(first, batch))


class Encoder(Adapter):
    """A module around a model that saves all of it, as Sentence Transformers does."""

    def save_pretrained(self, folder):
        self.base_model["model"].save_pretrained(folder)


def test_a_module_that_saves_its_whole_model_is_loaded_as_a_module_and_as_a_model(tmp_path):
    first, batch = attach(Encoder(bert()), "performer-positive", **SIZE, seed=3), inputs()
    save(first, tmp_path)
    for again in (load(tmp_path, into=Encoder(bert())), load(tmp_path)):
        assert torch.equal(logits(again, batch), logits(first, batch))


@pytest.mark.parametrize("earlier", ["linformer", "performer-positive"])
def test_a_whole_model_replaces_the_backends_of_an_adapter_in_the_same_folder(earlier, tmp_path):
    options = {"linformer": {"rank": 4}, "performer-positive": SIZE}
    save(attach(Adapter(bert()), earlier, seed=1, **options[earlier]), tmp_path)
    model, batch = attach(bert(), "performer-positive", **SIZE, seed=2), inputs()
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path), batch), logits(model, batch))
    save(model, tmp_path)
    assert torch.equal(logits(load(tmp_path, into=bert()), batch), logits(model, batch))


def test_what_cannot_be_saved_or_loaded_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="No backend with a registered name is attached"):
        save(bert(), tmp_path)
    with pytest.raises(DataError, match=r"neither efficient_attn\.json nor config\.json"):
        load(tmp_path, into=bert())
    with pytest.raises(OptionError, match=r"dtype=…: the model given by into=… is loaded already"):
        load(tmp_path, into=bert(), dtype="float32")
    bert().save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"config\.json names no backends"):
        load(tmp_path, into=bert())
    (tmp_path / "efficient_attn.json").write_text(json.dumps({"format": 1, "layers": {"0": {}}}))
    with pytest.raises(DataError, match=r"efficient_attn\.json: a layer in efficient_attn lacks"):
        load(tmp_path, into=bert())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_peft_model_keeps_its_backends(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed; no extra installs it")
    batch = inputs()
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    model = attach(peft.get_peft_model(llama(), config), "performer-positive", **SIZE)
    expected = logits(model, batch)
    save(model, tmp_path)
    again = load(tmp_path, into=peft.PeftModel.from_pretrained(llama(), tmp_path))
    assert torch.equal(logits(again, batch), expected)
    assert torch.allclose(logits(again.merge_and_unload(), batch), expected, atol=1e-3)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_sentence_transformer_keeps_its_backends(tmp_path):
    library = pytest.importorskip("sentence_transformers", reason=WITHOUT_ENCODERS)
    folder = saved(bert(), tmp_path / "model")
    model = library.SentenceTransformer(str(folder), local_files_only=True)
    texts = ["w1 w2 w3 w4", "w5 w6 w1"]
    exact = torch.as_tensor(model.encode(texts))
    attach(model, "performer-positive", **SIZE)
    expected = torch.as_tensor(model.encode(texts))
    assert not torch.allclose(exact, expected)
    save(model, tmp_path / "saved")
    arguments = {"attn_implementation": "sdpa"}
    plain = library.SentenceTransformer(str(tmp_path / "saved"), model_kwargs=arguments)
    torch.testing.assert_close(torch.as_tensor(plain.encode(texts)), exact)
    again = load(tmp_path / "saved", into=plain)
    torch.testing.assert_close(torch.as_tensor(again.encode(texts)), expected)
