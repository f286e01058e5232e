"""Headers of safetensors files that lie or have no end: one line, before anything is allocated."""

import contextlib
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from efficient_attn import limits, tensor_headers
from efficient_attn.errors import DataError
from efficient_attn.measure.inputs import read_activations
from efficient_attn.tensor_headers import check_header, load_tensors, read_header

ENTRY = {"dtype": "F32", "shape": [1, 2, 2], "data_offsets": [0, 16]}


def file_of(path, header, data=b"\0" * 48):
    """A file with this header, as text or as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entries(**changed):
    rest = {
        name: {**ENTRY, "data_offsets": [16 * place, 16 * place + 16]} for place, name in ((1, "k"), (2, "v"))
    }
    return {"q": {**ENTRY, **changed}, **rest}


def many(count, metadata=""):
    """The shortest header of so many tensors."""
    described = ",".join(f'"{n:x}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for n in range(count))
    return b"{" + f"{metadata}{described}".encode() + b"}"


CRAFTED = [
    (entries(shape=[2**62, 4]), "'q' has no shape that fits its data"),
    (entries(shape=[2**40]), "'q' has no shape that fits its data"),
    (entries(shape=[100, 100]), "'q' is larger than the file"),
    (entries(shape=[1] * 17), "'q' has no shape that fits its data"),
    (entries(shape=[-1, 2, 2]), "'q' has no shape that fits its data"),
    (entries(shape=[True, 2, 2]), "'q' has no shape that fits its data"),
    (entries(shape=[1.0, 2, 2]), "'q' has no shape that fits its data"),
    (entries(shape={"1": 1}), "'q' has no shape that fits its data"),
    (entries(shape=None), "'q' has no shape that fits its data"),
    (entries(dtype="F31"), "holds 'q' as 'F31'; dtypes are F64, F32"),
    (entries(dtype=["F32"]), "dtypes are F64, F32"),
    (entries(dtype="F64"), "is not a valid safetensors file"),
    (entries(data_offsets=[16, 32]), "is not a valid safetensors file"),
    (entries(data_offsets=[0, 2**62]), "is not a valid safetensors file"),
    (entries(data_offsets=[-16, 0]), "is not a valid safetensors file"),
    (entries(data_offsets=None), "is not a valid safetensors file"),
    ({**entries(), "__metadata__": {"tokens": 3}}, "its metadata are not strings"),
    ({**entries(), "__metadata__": [1]}, "its metadata are not strings"),
    ({**entries(), "x": 3}, "'x' has no shape that fits its data"),
    (json.dumps(entries()).encode()[:-1] + b', "q": 1}', "its header is no strict JSON: 'q' stands twice"),
    (b'{"q": NaN}', "its header is no strict JSON"),
    (b'{"q": ' + b"[" * 100_000 + b"}", "its header is no strict JSON"),
    (b'{"q": "\xff"}', "its header is no strict JSON"),
    (b"[]", "it has no header"),
    (b"", "it has no header"),
    (many(limits.TENSORS + 1), f"holds {limits.TENSORS + 1} tensors; at most {limits.TENSORS} are read"),
    (b"{" + b" " * limits.TENSOR_HEADER_BYTES, f"at most {limits.TENSOR_HEADER_BYTES} are read"),
]


@pytest.mark.parametrize(("header", "message"), CRAFTED, ids=[message for _, message in CRAFTED])
def test_a_crafted_header_is_refused_in_one_line(header, message, tmp_path):
    path = file_of(tmp_path / "it.safetensors", header)
    with pytest.raises(DataError, match=message) as caught:
        read_activations(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_header_within_the_limits_is_read(tmp_path):
    path = file_of(tmp_path / "it.safetensors", {**entries(), "__metadata__": {"a": "b"}})
    header = read_header(path)
    assert header.metadata == {"a": "b"} and header.tensors["q"].shape == (1, 2, 2)
    assert all(tensor.device.type == "meta" for tensor in header.tensors.values())
    assert read_activations(path).layers[0].q.shape == (1, 1, 2, 2)
    file_of(path, many(limits.TENSORS), b"")
    assert len(read_header(path).tensors) == limits.TENSORS


@pytest.mark.parametrize("read", [read_activations, read_header, check_header])
@pytest.mark.parametrize(
    "header", [many(limits.TENSORS + 1), b"{" + b" " * limits.TENSOR_HEADER_BYTES], ids=["tensors", "bytes"]
)
def test_what_exceeds_a_limit_is_refused_before_safetensors_reads_it(read, header, tmp_path, monkeypatch):
    path = file_of(tmp_path / "it.safetensors", header)
    monkeypatch.setattr(tensor_headers, "safe_open", lambda *_, **__: pytest.fail("it was opened"))
    with pytest.raises(DataError, match="at most"):
        read(path)


@pytest.mark.parametrize("read", [read_activations, read_header])
def test_a_file_with_holes_of_more_bytes_than_are_read_is_refused(read, tmp_path):
    size = limits.TENSOR_FILE_BYTES
    header = {"q": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    path = file_of(tmp_path / "it.safetensors", header, b"")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + size)
    with pytest.raises(DataError, match=f"bytes; at most {size} are read"):
        read(path)


def test_a_file_that_shrinks_after_its_header_was_read_is_refused(tmp_path):
    path = file_of(tmp_path / "it.safetensors", entries(), b"\0" * 8)
    with pytest.raises(DataError, match="is not a valid safetensors file"):
        load_tensors(path, ["q"])


WHOLE = save({name: torch.ones(1, 2, 2) for name in "qkv"}, metadata={"tokens": '["a", "b"]', "scale": "0.5"})


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(place=st.integers(0, len(WHOLE)), removed=st.integers(0, 40), added=st.binary(max_size=12))
def test_any_bytes_at_any_place_are_refused_or_read(tmp_path, place, removed, added):
    path = tmp_path / "it.safetensors"
    path.write_bytes(WHOLE[:place] + added + WHOLE[place + removed :])
    with contextlib.suppress(DataError):
        layers = read_activations(path).layers
        assert all(tensor.isfinite().all() for layer in layers.values() for tensor in layer)


def test_a_file_cut_off_at_any_byte_is_refused(tmp_path):
    path = tmp_path / "it.safetensors"
    for length in range(len(WHOLE)):
        path.write_bytes(WHOLE[:length])
        with pytest.raises(DataError, match="is not a valid safetensors file"):
            read_activations(path)


READ = """
import re, sys, time
from pathlib import Path
from efficient_attn.errors import DataError
from efficient_attn.measure.inputs import read_activations

def largest_kb():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

before, start = largest_kb(), time.process_time()
try:
    read_activations(sys.argv[1])
except DataError:
    print(time.process_time() - start, largest_kb() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize(
    "header",
    [
        many(360_000),
        many(limits.TENSOR_HEADER_BYTES // 60),
        many(limits.TENSORS),
        many(3, '"__metadata__":{' + ",".join(f'"{n:x}":""' for n in range(380_000)) + "},"),
        b'{"q":{"shape":[' + b"1," * 2_000_000 + b"1]}}",
        b'{"q":' + b"[" * 4_000_000,
    ],
    ids=["20 MB", "4 MB", "tensors", "metadata", "shape", "depth"],
)
def test_the_worst_headers_take_two_seconds_and_256_megabytes(header, tmp_path):
    command = [sys.executable, "-c", READ, str(file_of(tmp_path / "it", header, b""))]
    seconds, taken_kb = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert float(seconds) <= 2.0 and float(taken_kb) * 1024 <= 256e6


def test_the_docs_state_every_limit():
    page = (Path(__file__).parent.parent / "docs" / "reference.md").read_text(encoding="utf-8")
    stated = set(re.findall(r"\d+", page.partition("## Limits")[2]))
    known = {str(value) for name, value in vars(limits).items() if name.isupper()}
    assert known and known <= stated
