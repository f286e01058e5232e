"""What swapping refuses: requests that make no sense, and folders that are no model or would run code."""

import json
import shutil

import pytest

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import bart, bert, saved, texts

import efficient_attn as ea
from efficient_attn.errors import DataError, DtypeError, OptionError, UnsupportedError


def swap(model, backends, **changes):
    return ea.swap(model, backends, **{"texts": texts(), "rounds": 1, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"seq_lens": 65}, OptionError, "seq_len is at most the 64 positions of this model, not 65"),
        ({"seq_lens": 1}, OptionError, "seq_len is at least 2, not 1"),
        ({"seq_lens": 60}, DataError, "The text 'text 0' has 42 tokens, fewer than seq_len=60"),
        ({"texts": []}, DtypeError, "texts is a list of texts"),
        ({"texts": "a text"}, DtypeError, "texts is a list of texts, or a mapping"),
        ({"draws": 0}, OptionError, "draws"),
        ({"options": {"window": {"window": [4]}}, "backends": ["window"]}, OptionError, "window"),
        ({"backends": ["windw"]}, ValueError, "Did you mean 'window'"),
        ({"dtype": "int8"}, OptionError, "dtype"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(encoder, changes, error, message):
    given = {"backends": ["exact"], "texts": texts(), **changes}
    with pytest.raises(error, match=message):
        ea.swap(encoder, **given)


def test_a_model_that_is_loaded_needs_its_tokenizer_and_eval_mode(encoder):
    with pytest.raises(OptionError, match=r"give the pair \(model, tokenizer\)"):
        swap(bert(), ["exact"])
    with pytest.raises(OptionError, match="training mode"):
        swap((bert().train(), transformers.AutoTokenizer.from_pretrained(encoder)), ["exact"])
    with pytest.raises(DtypeError, match=r"model is a folder, a pair .* not int"):
        swap(3, ["exact"])


def test_an_encoder_with_a_decoder_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="is an encoder-decoder"):
        swap(saved(bart(), tmp_path), ["exact"])


def spoiled(encoder, path, change):
    """A copy of the folder, changed."""
    shutil.copytree(encoder, path)
    change(path)
    return path


def rewrite(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def only_a_pickle(path):
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")


def code_of_its_own(path):
    rewrite(path, model_type="strange", auto_map={"AutoModel": "modeling.Strange"})
    (path / "modeling.py").write_text("raise SystemExit('it ran')")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: shutil.rmtree(path), "is not a folder"),
        (lambda path: (path / "config.json").unlink(), r"holds no config\.json"),
        (lambda path: (path / "model.safetensors").unlink(), r"holds no model\.safetensors"),
        (only_a_pickle, r"as pytorch_model\.bin and no model\.safetensors\. Reading a pickle can run code"),
        (code_of_its_own, r"requires code of its own \(auto_map"),
        (lambda path: (path / "config.json").write_text("{"), "Cannot read .*config.json"),
        (lambda path: (path / "config.json").write_text("[]"), "is not a JSON object"),
        (lambda path: rewrite(path, architectures=["Nothing"]), r"names the class \['Nothing'\]"),
        (lambda path: rewrite(path, num_hidden_layers=4), "to another model: it lacks"),
        (
            lambda path: (path / "model.safetensors").write_bytes(b"\0" * 64),
            "is not a valid safetensors file",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_refused_in_one_line(encoder, tmp_path, change, message):
    with pytest.raises(DataError, match=message) as caught:
        swap(spoiled(encoder, tmp_path / "m", change), ["exact"])
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_refused(encoder, tmp_path):
    folder = saved(bert(vocab_size=20), tmp_path / "small")
    with pytest.raises(DataError, match=r"The tokenizer has ids up to 4\d, this model only 20 embeddings"):
        swap(folder, ["exact"])
