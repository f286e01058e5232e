"""The task copy of `train`: batches, loss, schedule, evaluation, refusals, and models that learn to copy."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_training import TINY
from torch import nn

import efficient_attn as ea
from efficient_attn.errors import OptionError, UnknownNameError, UnsupportedError
from efficient_attn.runner.variants import select
from efficient_attn.studies import find
from efficient_attn.studies.train import copying
from efficient_attn.studies.train.config import TrainConfig, rate_at
from efficient_attn.studies.train.copying import BEGIN, END, PADDING, Copier, CopyTask, teacher_forced
from efficient_attn.studies.train.tasks import IGNORED, Batch, bits, loss
from efficient_attn.studies.train.trainer import Trainer
from efficient_attn.transformer.block import DecoderBlock

COPY = {"task": "copy", "seq_len": 12}


def task(**changed):
    about = {"tokens": 12, "batch": 50, "model_dim": 8, "num_heads": 2, "num_layers": 1, "every": 2,
             "windows": 20, "learning_rate": 0.01, "seed": 0, "device": "cpu", "threads": 1}  # fmt: skip
    return CopyTask(TrainConfig(**{**about, "task": "copy", **changed}))


def variant(name, **options):
    (found,) = select([name], {name: {option: [value] for option, value in options.items()}})
    return found


def test_a_sequence_is_symbols_an_end_and_padding_and_the_decoder_reads_it_one_token_late():
    (source, target), wanted = task().batch(3)
    lengths = set()
    for ids, read, answer in zip(source.tolist(), target.tolist(), wanted.tolist(), strict=True):
        end = ids.index(END)
        lengths.add(end)
        assert all(one > END for one in ids[:end]) and set(ids[end + 1 :]) <= {PADDING}
        assert read == [BEGIN, *ids[:-1]]
        assert answer == [*ids[: end + 1], *[IGNORED] * (len(ids) - end - 1)]
    assert lengths == set(range(6, 12))
    assert set(source.flatten().tolist()) == {PADDING, *range(END, 19)}


def test_batches_follow_from_seed_and_step_and_held_out_sequences_are_in_none():
    one = task(tokens=16, windows=50)
    assert torch.equal(one.batch(3).wanted, task(tokens=16).batch(3).wanted)
    assert not torch.equal(one.batch(3).wanted, one.batch(4).wanted)
    assert not torch.equal(one.batch(3).wanted, task(tokens=16, seed=1).batch(3).wanted)
    learned = {tuple(row) for step in range(100) for row in one.batch(step).wanted.tolist()}
    assert len(learned) == 5000 and not learned & {tuple(row) for row in one.held_out.wanted.tolist()}
    # As many are drawn of either: a stream of numbers of its own has to make the difference.
    assert len(one.held_out.wanted) == len(one.batch(0).wanted) == 50


class Fixed(nn.Module):
    """A model whose logits are given."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, *inputs):
        return self.logits


def by_formula(logits, wanted, smoothing):
    """−Σ q log p over the vocabulary, q = (1 − ε) [wanted] + ε / vocabulary; the cost of each real token."""
    costs = []
    for rows, answers in zip(logits.tolist(), wanted.tolist(), strict=True):
        for row, answer in zip(rows, answers, strict=True):
            if answer != IGNORED:
                total = math.log(sum(map(math.exp, row)))
                q = [smoothing / len(row) + (1 - smoothing) * (place == answer) for place in range(len(row))]
                costs.append(-sum(share * (one - total) for share, one in zip(q, row, strict=True)))
    return costs


def test_the_loss_is_that_of_smoothed_labels_in_float64_and_padding_never_enters_it():
    one = task(batch=6)
    batch = one.batch(0)
    logits = torch.randn(6, 12, 19, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    costs = by_formula(logits, batch.wanted, one.label_smoothing)
    assert one.label_smoothing == 0.1
    assert loss(one, Fixed(logits), batch).item() == pytest.approx(np.mean(costs), rel=1e-12)
    moved = torch.where((batch.wanted == IGNORED)[..., None], logits + 1e3 * torch.randn(19), logits)
    assert torch.equal(loss(one, Fixed(moved), batch), loss(one, Fixed(logits), batch))
    assert torch.equal(bits(Fixed(moved), batch), bits(Fixed(logits), batch))
    row = by_formula(logits[:1], batch.wanted[:1], 0.0)
    assert bits(Fixed(logits), batch)[0].item() == pytest.approx(np.mean(row) / math.log(2), rel=1e-12)


@pytest.mark.parametrize(("model_dim", "warmup"), [(512, 4000), (64, 156.25)])
def test_the_schedule_is_equation_3_with_the_warm_up_of_its_peak(model_dim, warmup):
    peak = (model_dim * warmup) ** -0.5
    one = task(model_dim=model_dim, learning_rate=peak)
    for step in (1, 2, 100, 156, 157, 3999, 4000, 4001, 10**6):
        wanted = model_dim**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert rate_at(step, peak=peak, warmup=one.warmup) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("model_dim", [16, 64, 512])
def test_the_default_rate_has_the_same_warm_up_in_models_of_all_sizes(model_dim):
    (note,) = find("train").plan(["exact"], **{**TINY, **COPY, "model_dim": model_dim, "steps": 2}).notes
    assert "of 2 steps, so that hardly anything may be learned" in note and "with 156 steps" in note
    one = task(model_dim=model_dim, learning_rate=copying.default_rate(model_dim))
    assert one.warmup == pytest.approx(156.25, rel=1e-12)


@pytest.mark.parametrize(
    ("rate", "warmup"), [(0.001, "15625 of 400"), (0.01, None), (0.12, None), (0.2, "0.390625 of 400")]
)
def test_a_warm_up_that_does_not_end_or_is_none_is_noted(rate, warmup):
    one = task(model_dim=64, learning_rate=rate)
    notes = copying.doubtful_warmup(one, one._config, steps=400)
    assert len(notes) == (warmup is not None)
    assert not notes or f"(model_dim · learning_rate²) = {warmup} steps" in notes[0]


def trainer(**changed):
    config = task(**changed)._config
    return Trainer(variant("exact"), CopyTask(config), config)


def test_evaluated_is_an_average_of_the_weights_and_training_goes_on_from_the_last_ones():
    one = trainer(every=30)
    name, weight = next(iter(one.model.named_parameters()))
    seen, share, initial = [], 1.0, weight.detach().clone()
    for _ in range(30):
        one.advance()
        seen.append(weight.detach().clone())
    average = initial
    for step, now in enumerate(seen, start=1):
        decay = min(0.98, step / (step + 9))
        average, share = decay * average + (1 - decay) * now, share * decay
    torch.testing.assert_close(one._average[name], average)
    assert share < 1e-6, "the initial weights are still in the average"

    last = {key: tensor.clone() for key, tensor in one.model.state_dict().items()}
    one.evaluate()
    assert all(torch.equal(tensor, last[key]) for key, tensor in one.model.state_dict().items())
    by_last = bits(one.model.eval(), one.task.held_out)
    one.model.load_state_dict(one._average)
    of_average = bits(one.model, one.task.held_out)
    torch.testing.assert_close(torch.tensor(one.progress.held_out).double(), of_average.detach())
    assert not torch.allclose(by_last, of_average)


def test_the_optimiser_is_adam_with_the_settings_of_section_5_3():
    own, theirs = (nn.Linear(3, 2) for _ in range(2))
    theirs.load_state_dict(own.state_dict())
    mine = task().optimiser(own)
    adam = torch.optim.Adam(theirs.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-9)
    for step in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        for model, learner in ((own, mine), (theirs, adam)):
            learner.zero_grad()
            # Gradients as small as ε, so that it counts.
            (1e-9 * model(x).square().sum()).backward()
            for group in learner.param_groups:
                group["lr"] = 0.01
            learner.step()
    assert all(torch.equal(a, b) for a, b in zip(own.parameters(), theirs.parameters(), strict=True))


def test_padding_changes_no_logit_of_a_real_token():
    one = task()
    model = one.model(variant("exact")).double()
    source = one.batch(0).inputs[0][:4]
    longer = F.pad(source, (0, 5), value=PADDING)
    short, long = (teacher_forced(ids) for ids in (source, longer))
    real = short.wanted != IGNORED
    torch.testing.assert_close(model(*long.inputs)[:, :12][real], model(*short.inputs)[real])


@pytest.mark.parametrize("name", ea.list_backends())
def test_models_of_all_backends_begin_with_the_same_weights_and_exact_stays_where_a_backend_cannot_serve(
    name,
):
    one = task()
    # The defaults are longer than these sequences.
    sizes = {"window": {"window": 5}, "linformer": {"rank": 4}}
    model = one.model(variant(name, **sizes.get(name, {})))
    own, exact = model.state_dict(), one.model(variant("exact")).state_dict()
    assert set(exact) <= set(own) and all(torch.equal(own[key], exact[key]) for key in exact)
    block, promised = model.transformer.decoder.blocks[0], ea.spec(name).capabilities
    assert model.transformer.encoder.blocks[0].attention.backend.spec.name == name
    assert (block.attention.backend.spec.name == name) == promised.causal
    assert (block.cross_attention.backend.spec.name == name) == promised.cross


def test_a_note_names_the_parts_that_stay_exact():
    assert copying.stays_exact([variant("exact"), variant("performer-positive")]) == []
    (note,) = copying.stays_exact([variant("exact"), variant("linformer"), variant("window")])
    assert note.endswith("in the self-attention of the decoder: linformer; in cross-attention: window.")


def run(backends=("exact",), **changed):
    about = {**TINY, **COPY, "size": 4, "steps": 2, **changed}
    return ea.train(list(backends), **about)


def test_accuracies_count_the_mistakes_of_beam_search(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def decoded(self, source):
        found = source.clone()
        # The first sequence of each part has two mistakes, and what follows an end counts for nothing.
        found[0, :2] = BEGIN
        return torch.where(source == PADDING, END, found)

    monkeypatch.setattr(Copier, "decode", decoded)
    (record,) = run(windows=8, batch=4).records
    assert record.answers == int((task(windows=8).held_out.wanted != IGNORED).sum())
    assert record.accuracy == pytest.approx(1 - 4 / record.answers)
    assert record.sequence_accuracy == 0.75
    assert record.case.inputs == "copy(symbols=16)" and record.case.of == "encoder-decoder"


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"task": "copi"}, UnknownNameError, "No choice of task is called 'copi'. Did you mean 'copy'"),
        ({"text": "text.txt"}, OptionError, r"text=text\.txt: the task copy draws its sequences"),
        ({"steps": 3}, OptionError, "steps=3 does not end with an evaluation"),
        ({"warmup": 20}, OptionError, "The task copy takes neither positions nor warmup"),
        ({"positions": "rotary"}, OptionError, "The task copy takes neither positions nor warmup"),
        ({"seq_len": 11}, OptionError, "seq_len=11: the task copy takes 12 or more"),
        ({"learning_rate": 1e200}, OptionError, r"learning_rate=1e\+200: the task copy takes 1e-06 to 1, by"),
        ({"learning_rate": 1e-170}, OptionError, "learning_rate=1e-170: the task copy takes"),
        ({"model_dim": 0}, OptionError, "model_dim is at least 1, not 0"),
        ({"model_dim": 9, "num_heads": 3}, OptionError, "model_dim=9 is odd, and sinusoidal positions"),
        (
            {"backends": [lambda q, k, v: v]},
            UnsupportedError,
            "takes no key mask, and sequences .* are padded",
        ),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(changed, error, message):
    with pytest.raises(error, match=message) as caught:
        run(**changed)
    assert "\n" not in str(caught.value)


def test_tables_sentence_and_plot_show_accuracies_and_bits_per_token():
    results = run(["exact", "window"], steps=4)
    (table,), (sentence,) = results.tables(), results.sentences()
    assert table.title.startswith("Sequences copied: copy, symbols 16, up to 12 tokens; 1 + 1 blocks of 2")
    assert table.columns[:5] == ("backend", "steps", "tokens right", "copied exactly", "bits per token")
    assert {row[0] for row in table.rows} == {"exact", "window(window=5)"}
    assert (
        sentence.startswith("After 4 steps exact attention copies ")
        and "less than 99.9% of tokens: window(window=5) (" in sentence
    )
    assert results.plot().get_ylabel() == "bits per token"
    assert any("in cross-attention: window(window=5)" in note for note in results.notes)


def test_the_default_backends_are_few_and_the_default_steps_end_with_an_evaluation():
    points = find("train").plan(task="copy").points
    assert [point.case.backend for point in points] == ["exact", "window", "linformer", "performer-positive"]
    assert [point.rounds for point in points] == [8] * 4 and {point.case.threads for point in points} == {1}
    for every, rounds in ((30, 14), (1000, 1)):
        (point,) = find("train").plan(["exact"], task="copy", every=every).points
        assert point.rounds == rounds


def learned(seed, **changed):
    """The exact model of a run with the defaults of the task."""
    (record,) = ea.train(["exact"], task="copy", seed=seed, threads=1, **changed).records
    return record


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_exact_attention_copies_unseen_sequences_with_beam_search(seed, undrawn, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = learned(seed)
    assert record.accuracy >= 0.999 and record.sequence_accuracy >= 0.99
    # The optimum under label smoothing gives the right token 0.9 + 0.1 / 19.
    assert abs(record.held_out_bits_per_token[-1] + math.log2(0.9 + 0.1 / 19)) < 0.05


def without_context(self, x, keys):
    return self.feed_forward_residual.post(x, self.feed_forward(self.feed_forward_residual.pre(x)))


def unshifted(source):
    return Batch((source, source), source.masked_fill(source == PADDING, IGNORED))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [(DecoderBlock, "_read_and_feed", without_context), (copying, "teacher_forced", unshifted)],
    ids=["no cross-attention", "no shift"],
)
def test_a_broken_model_does_not_copy(owner, name, broken, undrawn, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(owner, name, broken)
    # After as many steps the sound model is right in more than 0.95 of its tokens.
    record = learned(0, steps=300)
    assert record.accuracy < 0.5 and record.sequence_accuracy == 0
    assert find("train").own([record]) == [record]
