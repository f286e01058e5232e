"""The pictures of weights: the right numbers, the words on the axes, and nothing of what names could do."""

import numpy as np
import pytest
import torch
from drawn import texts

import efficient_attn as ea
from efficient_attn.measure.inputs import sample, shipped
from efficient_attn.ops.softmax.definition import softmax_weights
from efficient_attn.studies.show import Shown, WeightsMap, show


@pytest.fixture(scope="module")
def shown() -> Shown:
    return ea.show(["linformer"], options={"linformer": {"rank": [128]}}, head=2, tokens="3:9")


def test_exact_weights_come_first_and_are_those_of_the_head_and_the_words(shown):
    q, k, _ = sample(1, dtype=torch.float64)
    weights = softmax_weights(q, k, scale=32**-0.5, key_mask=None)[0, 2, 3:9]
    exact, other = shown.maps
    assert (exact.label, other.label) == ("exact", "linformer(rank=128)")
    # The weights are given in float32.
    np.testing.assert_allclose(exact.weights, weights[:, 3:9], rtol=1e-4, atol=1e-7)
    assert exact.error < 1e-5 < other.error


def test_the_words_of_the_text_stand_on_both_axes(shown):
    words = list(shipped().tokens[3:9])
    axes = shown.plot().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == words
    assert [label.get_text() for label in axes.get_xticklabels()] == words


def test_the_titles_have_the_error_of_the_table(shown):
    written = texts(shown.plot())
    table = shown.table()
    for one, row in zip(shown.maps, table.rows, strict=True):
        assert row[0] == one.label
        assert f"error {row[1]}" in written


def test_the_decoder_is_shown_causally_with_its_own_words(short_decoder):
    causal = ea.show(["exact", "linformer"], inputs="decoder", head=4, tokens="3:9")
    q, k, _ = (x[..., :short_decoder, :].double() for x in sample(19, 4))
    weights = softmax_weights(q, k, scale=1 / 8, key_mask=None, causal=True)[0, 4, 3:9, 3:9]
    (exact,) = causal.maps
    np.testing.assert_allclose(exact.weights, weights, rtol=1e-4, atol=1e-7)
    assert exact.weights[0, 1] == 0 and causal.words == shipped(4).tokens[3:9]
    assert causal.notes[0].startswith("linformer: UnsupportedError")


def test_the_shorter_layer_of_the_decoder_is_shown_where_it_is_named(short_decoder):
    weights = ea.show(["window"], inputs="decoder", layer=18, tokens="3:9")
    assert "layer 18" in weights.title and f"{short_decoder // 2} keys" in weights.title
    assert weights.words == shipped(4).tokens[3:9]


def map_of(label, weights):
    return WeightsMap(label, np.array(weights, dtype=float), 0.5)


def test_hostile_names_and_words_are_drawn_as_they_are(tmp_path):
    hostile = "$\\frac{x}{<script>\x1b[2J"
    maps = (map_of(hostile, [[0.5, 0.5]] * 2),)
    figure = Shown(maps=maps, words=(hostile, "$"), title=hostile).plot()
    figure.savefig(tmp_path / "hostile.svg")
    assert "\x1b" not in (tmp_path / "hostile.svg").read_text()
    assert hostile.replace("\x1b", " ") in texts(figure)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": "0-9"}, "tokens are a range such as 0:24, not '0-9'"),
        ({"tokens": "9:9"}, "tokens are a range within 0:512"),
        ({"tokens": "500:513"}, "tokens are a range within 0:512"),
        ({"head": 12}, "head is from 0 to 11, not 12"),
        ({"layer": 2}, "layer 2 is not in encoder"),
        ({"inputs": "decoder", "layer": 1}, "layer 1 is not in decoder; it has 18, 19"),
        ({"inputs": "gaussian"}, "Gaussian draws have no words"),
        ({"inputs": "missing.safetensors"}, "there is no such file"),
        ({"backends": ["windw"]}, "Did you mean 'window'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(settings, message):
    with pytest.raises(ea.AttentionError, match=message) as told:
        show(**settings)
    assert "\n" not in str(told.value)


def test_the_command_prints_the_numbers_and_writes_the_picture_three_times(tmp_path, monkeypatch, capsys):
    main = pytest.importorskip("efficient_attn_cli.main", reason="needs an installation").main
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["show", "--backend", "linformer", "--tokens", "0:4", "--out", "here"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-3:] == ["here/show.png", "here/show.svg", "here/show.pdf"]
    assert " exact " in out and " linformer " in out
    assert all((tmp_path / path).stat().st_size for path in out.splitlines()[-3:])


def test_what_cannot_be_shown_is_told_beside_what_can():
    def narrow(q, k, v):
        return v[..., :1]

    def broken(q, k, v):
        raise RuntimeError("it broke\nhere")

    shown = show([narrow, broken, "exact"], tokens="0:4")
    assert [one.label for one in shown.maps] == ["exact"]
    assert shown.notes[0].startswith("narrow: WrongOutputError: the output has shape [1, 12, 512, 1]")
    assert shown.notes[1] == "broken: RuntimeError: it broke here"
