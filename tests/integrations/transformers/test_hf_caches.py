"""Generation: without a cache, with keys and values kept, with a state kept, it is the same text."""

import logging

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import DECODERS, VOCABULARY, WINDOW, bert, gemma3, gpt2, llama, mistral

import efficient_attn as ea
from efficient_attn.errors import DtypeError, UnsupportedError
from efficient_attn.integrations.transformers import StateCache, attach, register, swapped

NEW = 6
register()


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, "efficient_attn")


def prompt():
    """Two texts, the second padded on the left by more than one token."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :3] = 0
    return {
        "input_ids": torch.randint(4, VOCABULARY, mask.shape, generator=generator),
        "attention_mask": mask,
    }


def generated(model, **choices):
    """The tokens that were generated and the logits that they were chosen by."""
    made = model.generate(
        **prompt(),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **choices,
    )
    return made.sequences, torch.stack(made.logits)


def assert_same(found, expected):
    """The promised 1e-5, of the largest logit where logits are larger than one."""
    tolerance = 1e-5 * max(1.0, float(expected[1].abs().max()))
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=tolerance)
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("name", DECODERS)
def test_exact_generates_what_sdpa_generates_with_every_cache(name):
    model = DECODERS[name]()
    expected = generated(model)
    model.set_attn_implementation("efficient_attn.exact")
    assert_same(generated(model), expected)
    assert_same(generated(model, use_cache=False), expected)
    assert_same(generated(model, past_key_values=StateCache(model)), expected)
    assert_same(generated(model, cache_implementation="static", disable_compile=True), expected)


PAIRS = [(llama, name) for name in ea.list_backends(causal=True)]


@pytest.mark.parametrize(("make", "backend"), [*PAIRS, (gpt2, "performer-positive"), (gpt2, "window")])
def test_no_cache_kept_keys_and_a_state_agree(make, backend):
    model = make()
    options = {"window": WINDOW} if backend == "window" else {}
    attach(model, backend, **options)
    ea.calibrate(model, torch.randint(4, VOCABULARY, (2, 30)))
    expected = generated(model, use_cache=False)
    assert_same(generated(model), expected)
    assert_same(generated(model, past_key_values=StateCache(model)), expected)
    assert_same(generated(model, cache_implementation="static", disable_compile=True), expected)


def state_bytes(cache):
    return sum(x.nbytes for layer in cache.layers for x in layer.state)


@pytest.mark.parametrize(
    ("make", "full"), [(llama, "performer-positive"), (gemma3, "performer-positive"), (mistral, None)]
)
def test_the_state_of_linear_attention_and_of_windows_does_not_grow(make, full):
    model = make()
    if full is None:
        attach(model, sliding="window")
    else:
        attach(model, full=(full, {"num_features": 16}))
    cache, sizes = StateCache(model), []
    with torch.no_grad():
        for _ in range(4):
            model(torch.randint(4, VOCABULARY, (1, 8)), past_key_values=cache)
            sizes.append(state_bytes(cache))
    assert cache.get_seq_length() == 32
    assert len(set(sizes)) == 1


def test_a_window_keeps_one_key_less_than_it_reads():
    model = attach(mistral(), sliding="window")
    cache = StateCache(model)
    generated(model, past_key_values=cache)
    assert {layer.state.k.shape[2] for layer in cache.layers} == {WINDOW - 1}


@pytest.mark.parametrize("backend", ["exact", "performer-positive"])
def test_beams_are_reordered_with_their_states(backend):
    model = attach(llama(), backend)
    choices = {"num_beams": 3, "num_return_sequences": 2}
    expected = generated(model, **choices)
    assert torch.equal(generated(model, past_key_values=StateCache(model), **choices)[0], expected[0])


def test_a_text_may_come_in_pieces():
    model, ids = attach(llama(), "performer-positive"), torch.randint(4, VOCABULARY, (2, 20))
    cache = StateCache(model)
    with torch.no_grad():
        whole = model(ids).logits
        pieces = [model(part, past_key_values=cache).logits for part in ids.split([7, 1, 12], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-5, atol=1e-4)


def test_a_state_is_refused_where_nothing_keeps_one():
    with pytest.raises(UnsupportedError, match="attach first"):
        StateCache(llama())
    encoder = attach(bert(), "exact")
    with pytest.raises(UnsupportedError, match="for decoders"):
        StateCache(encoder)
    with pytest.raises(DtypeError, match="transformers model, or holds one, not int"):
        StateCache(3)


def test_tokens_cannot_be_taken_back_from_a_state():
    model = attach(llama(), "performer-positive")
    cache = StateCache(model)
    generated(model, past_key_values=cache)
    with pytest.raises(UnsupportedError, match="cannot remove tokens"):
        cache.crop(-1)


@pytest.mark.parametrize("make", [llama, mistral])
def test_a_state_that_does_not_reach_the_attention_is_noticed(make, monkeypatch):
    from efficient_attn.integrations.transformers.caches import StateLayer

    model = attach(make(), "exact")
    cache = StateCache(model)

    def without_mark(self, k, v, *_, **__):
        self.seen += k.shape[-2]
        return k, v

    monkeypatch.setattr(StateLayer, "update", without_mark)
    ids = torch.randint(4, VOCABULARY, (1, 3))
    model(ids, past_key_values=cache)
    with pytest.raises(UnsupportedError, match="copies or changes the keys of its cache"):
        model(ids, past_key_values=cache)


def test_a_cache_that_is_made_inside_swapped_serves_there():
    model = llama()
    before = generated(model)
    with swapped(model, "exact"):
        assert_same(generated(model, past_key_values=StateCache(model)), before)
    assert torch.equal(generated(model)[1], before[1])
