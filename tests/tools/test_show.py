"""The pictures of weights: the right numbers, the words on the axes, and nothing of what names could do."""

import numpy as np
import pytest
import torch
from figure_texts import texts

import efficient_attn as ea
from efficient_attn.measure.inputs import sample, shipped
from efficient_attn.ops.softmax.definition import softmax_weights
from efficient_attn.tools.show import Shown


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


def test_the_picture_has_the_words_on_both_axes_and_the_errors_of_the_table(shown):
    figure = shown.plot()
    for labels in (figure.axes[0].get_yticklabels(), figure.axes[0].get_xticklabels()):
        assert [label.get_text() for label in labels] == list(shipped().tokens[3:9])
    for one, row in zip(shown.maps, shown.table().rows, strict=True):
        assert row[0] == one.label and f"error {row[1]}" in texts(figure)


def test_the_decoder_is_shown_causally_with_its_own_words(short_decoder):
    causal = ea.show(["exact", "linformer"], inputs="decoder", head=4, tokens="3:9")
    q, k, _ = (x[..., :short_decoder, :].double() for x in sample(19, 4))
    weights = softmax_weights(q, k, scale=1 / 8, key_mask=None, causal=True)[0, 4, 3:9, 3:9]
    (exact,) = causal.maps
    np.testing.assert_allclose(exact.weights, weights, rtol=1e-4, atol=1e-7)
    assert exact.weights[0, 1] == 0 and causal.words == shipped(4).tokens[3:9]
    assert causal.notes[0].startswith("linformer: UnsupportedError")


@pytest.mark.slow
def test_the_command_prints_the_numbers_and_writes_the_picture_three_times(tmp_path, monkeypatch):
    pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
    from command_line import command

    monkeypatch.chdir(tmp_path)
    code, out, _ = command("show", "--backend", "linformer", "--tokens", "0:4", "--out", "here")
    assert code == 0 and " exact " in out and " linformer " in out
    assert out.splitlines()[-3:] == ["here/show.png", "here/show.svg", "here/show.pdf"]
    assert all((tmp_path / path).stat().st_size for path in out.splitlines()[-3:])


def test_what_cannot_be_shown_is_told_beside_what_can():
    def narrow(q, k, v):
        return v[..., :1]

    def broken(q, k, v):
        raise RuntimeError("it broke\nhere")

    shown = ea.show([narrow, broken, "exact"], tokens="0:4")
    assert [one.label for one in shown.maps] == ["exact"]
    assert shown.notes[0].startswith("narrow: WrongOutputError: the output is a tensor [1, 12, 512, 1]")
    assert shown.notes[1].startswith("broken: RuntimeError: it broke here (test_show.py, line ")
