"""Files of training that are cut off, made up or of another model: one line, and nothing is changed."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import efficient_attn as ea
from efficient_attn.errors import DataError
from efficient_attn.studies import find
from efficient_attn.studies.train import checkpoints
from efficient_attn.studies.train.checkpoints import load_checkpoint, write_tensors

TINY = {"seq_len": 8, "batch": 2, "model_dim": 8, "num_heads": 2, "num_layers": 1, "every": 2, "windows": 8,
        "size": 4, "threads": 1, "text": "text.txt"}  # fmt: skip
CHECKPOINT = Path("out/checkpoints/window-window-4.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The files of a run of two steps."""
    folder, before = tmp_path_factory.mktemp("finished"), Path.cwd()
    os.chdir(folder)
    try:
        Path("text.txt").write_text("".join(f"line {number} of the text\n" for number in range(120)))
        ea.train(["window"], steps=2, out="out", **TINY)
        return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    finally:
        os.chdir(before)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, finished, undrawn):
    monkeypatch.chdir(tmp_path)
    for path, data in finished.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def go_on():
    return ea.train(["window"], steps=4, out="out", resume=True, **TINY)


def about(path):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.metadata()


def rewrite(path, tensors, described):
    """A file of our form with other contents, as its author would write it: the checksum is theirs."""
    write_tensors(path, tensors, described)


def with_tensor(name, tensor):
    def change(path):
        tensors = load_file(path) | ({} if tensor is None else {name: tensor})
        if tensor is None:
            del tensors[name]
        rewrite(path, tensors, json.loads(about(path)["about"]))

    return change


def with_progress(progress):
    def change(path):
        rewrite(path, load_file(path), {**json.loads(about(path)["about"]), "progress": progress})

    return change


def with_about(**changed):
    return lambda path: save_file(load_file(path), path, metadata={**about(path), **changed})


def cut(share):
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


ONE = torch.zeros(1, dtype=torch.float64)
NORM = "model.stack.norm.weight"
DAMAGES = [
    (cut(0), "not a valid safetensors file"),
    (cut(0.5), "not a valid safetensors file"),
    (cut(0.999), "not a valid safetensors file"),
    (lambda path: path.write_bytes(b"\xff" * 4000), "not a valid safetensors file"),
    (lambda path: path.write_bytes(b"\xff\xff\xff\x7f\0\0\0\0{" + b" " * 4000), "has a header of 2147"),
    (with_about(format="another"), "has format 'another'; wanted is 'efficient-attn training 3'"),
    (with_about(about="[1]"), "The description in .* is no JSON object"),
    (with_about(about="{" * 9999), "The description in .* is no strict JSON"),
    (with_about(about='{"a": 1, "a": 2}'), "The description in .* is no strict JSON: 'a' stands twice"),
    (with_about(about="{}"), "begun with"),
    (with_tensor(NORM, None), f"of another model: it lacks '{NORM}'"),
    (with_tensor(NORM, torch.ones(3)), rf"of another model: '{NORM}' is torch.float32 \[3\], not .* \[8\]"),
    (with_tensor(NORM, torch.ones(8).double()), rf"'{NORM}' is torch.float64 \[8\], not torch.float32 \[8\]"),
    (with_tensor(NORM, torch.full((8,), float("nan"))), f"holds '{NORM}' with entries that are not finite"),
    (with_tensor("model.own", ONE), "has the unexpected tensor 'model.own'"),
    (with_tensor("optimiser.own.step", ONE), "has the unexpected tensor 'optimiser.own.step'"),
    (with_progress(None), "damaged: its progress is not readable"),
    (with_progress({"curve": [[2, 1.0, 1.0]]}), "damaged: its progress is not readable: .* length 4"),
    (with_progress({"curve": [[1, 1.0, 1.0, 1.0]]}), "damaged: its curve cannot be that of this run"),
    (with_progress({"recent": [1.0] * 5}), "damaged: its curve cannot be that of this run"),
    (with_progress({"recent": [True]}), "damaged: its progress is not readable"),
    (with_progress({"mistakes": [-1]}), "damaged: its progress is not readable"),
    (with_progress({"trained_s": [2.0]}), "damaged: its progress is not readable"),
    (with_progress({"trained_s": -1.0}), "damaged: its progress is not readable"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_one_line_and_left_alone(damage, message):
    damage(CHECKPOINT)
    before = {
        path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file() and path.name != ".lock"
    }
    with pytest.raises(DataError, match=message) as caught:
        go_on()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert {path: path.read_bytes() for path in before} == before


def flipped(place):
    """One bit of the file, the other way round."""

    def change(path):
        data = bytearray(path.read_bytes())
        data[place] ^= 1 << (place % 8)
        path.write_bytes(data)

    return change


def places(whole, step):
    """Every `step`-th byte of the header, fewer of the data, and the last."""
    header = 8 + int.from_bytes(whole[:8], "little")
    return {*range(0, header, step), *range(header, len(whole), 31 * step), len(whole) - 1}


everywhere = pytest.mark.parametrize("step", [41, pytest.param(1, marks=pytest.mark.slow)])


@pytest.fixture
def trainer():
    """The model of the checkpoint before its first step."""
    plan = find("train").plan(["window"], **TINY, steps=4)
    return plan.attach.__self__._trainers[1]


@everywhere
def test_a_flipped_bit_anywhere_is_found(step, trainer):
    whole = CHECKPOINT.read_bytes()
    for place in places(whole, step):
        flipped(place)(CHECKPOINT)
        with pytest.raises(DataError):
            load_checkpoint(Path("out"), trainer)
        CHECKPOINT.write_bytes(whole)
    load_checkpoint(Path("out"), trainer)
    assert trainer.step == 2


@everywhere
def test_a_file_cut_off_anywhere_is_refused(step, trainer):
    whole = CHECKPOINT.read_bytes()
    for length in places(whole, step):
        CHECKPOINT.write_bytes(whole[:length])
        with pytest.raises(DataError, match="is not a valid safetensors file"):
            load_checkpoint(Path("out"), trainer)


def test_a_damaged_checkpoint_ends_in_advice_that_works():
    flipped(-9)(CHECKPOINT)
    with pytest.raises(DataError, match=r"window-4\.safetensors is damaged: .* delete it and train .* again"):
        go_on()
    CHECKPOINT.unlink()
    assert {record.train_steps for record in go_on().records} == {(2, 4)}


def test_a_checkpoint_of_another_model_is_refused_before_its_tensors_are_read(monkeypatch):
    with_tensor(NORM, torch.ones(3))(CHECKPOINT)
    load = checkpoints.load_tensors

    def others(path, names):
        assert path != CHECKPOINT, "its tensors were read"
        return load(path, names)

    monkeypatch.setattr(checkpoints, "load_tensors", others)
    with pytest.raises(DataError, match="of another model"):
        go_on()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "one.safetensors"
    write_tensors(path, {"x": ONE}, {"a": 1})
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"Cannot write .*: No space left on device"):
        write_tensors(path, {"x": ONE + 1}, {"a": 2})
    assert path.read_bytes() == before and [one.name for one in tmp_path.glob("one*")] == [path.name]


def test_models_whose_records_were_lost_are_taken_up_from_their_checkpoints():
    Path("out/records.jsonl").unlink()
    Path("out/environment.json").unlink()
    assert {record.train_steps for record in go_on().records} == {(2, 4)}
