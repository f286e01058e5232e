"""Certified values: computed again, reached by our formulas, and able to see a fault of 1e-9."""

import importlib
import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from efficient_attn.conformance.certified import (
    KERNELS,
    NO_DIGITS,
    SLACK,
    certified_cases,
    certified_digits,
    least_digits,
)
from efficient_attn.conformance.subject import subject
from efficient_attn.errors import UnsupportedError
from efficient_attn.testing import adapt

ROOT = Path(__file__).parents[2]
FILE = ROOT / "efficient_attn/data/certified.safetensors"
SCRIPT = runpy.run_path(str(ROOT / "docs/certified.py"))
CASES = {case.name: case for case in certified_cases()}
QUANTITIES = ("output", "dq", "dk", "dv")
# Cases of each formula; a window has as many queries as keys, unless it is causal.
FORMULAS = {"exact": 24, "exact-dense": 24, "naive": 24, "window": 22}
FORMULAS |= {"linear-elu": 3, "linear-relu": 2, "performer-positive": 3}


def digits_of(thing):
    return list(certified_digits(subject(thing, None, 0)))


def attend(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1) @ v


def test_the_file_has_24_cases_of_softmax_and_8_of_linear_kernels_that_are_exact_in_half_precision():
    kinds = [case.kind for case in CASES.values()]
    assert (kinds.count("softmax"), len(kinds)) == (24, 32) and {*kinds} == {"softmax", *KERNELS}
    assert list(SCRIPT["CASES"]) == sorted(CASES, key=list(SCRIPT["CASES"]).index)
    assert FILE.stat().st_size <= 400_000
    for case in CASES.values():
        tensors = case.tensors
        for name in {"q", "k", "v", "dO", "directions"} & tensors.keys():
            assert tensors[name].dtype == torch.bfloat16
            assert torch.equal(tensors[name].half().double(), tensors[name].double())
        assert all(tensors[name].dtype == torch.float64 for name in (*QUANTITIES, "lse"))
        assert max(tensors["q"].shape[2], tensors["k"].shape[2]) <= (200 if case.name == "long" else 24)
        blind = tensors["lse"] == -torch.inf
        assert torch.equal(blind, (tensors["output"] == 0).all(dim=-1)) and not tensors["dq"][blind].any()
    assert any((case.tensors["lse"] == -torch.inf).any() for case in CASES.values())


def test_rows_of_large_norm_have_two_to_eight_keys_within_1_of_the_largest_score():
    large = [name for name, inputs in SCRIPT["CASES"].items() if inputs.norm >= 20]
    assert len(large) == 3
    for name in large:
        near = SCRIPT["near_the_largest"](SCRIPT["CASES"][name], CASES[name].tensors)
        assert near.min() >= 2 and near.max() <= 8
        assert float(CASES[name].tensors["q"].double().std()) > 0.7 * SCRIPT["CASES"][name].norm


@pytest.mark.slow
def test_the_script_computes_every_bit_of_the_file_again():
    pytest.importorskip("mpmath")
    names = ["two-keys", "grouped-blind", "ties", "cancelling", "norm-50", "elu-grouped", "positive-causal"]
    assert SCRIPT["differences"](names) == []


@pytest.fixture
def page_script(monkeypatch):
    """The script that writes the page; it imports its neighbours."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("certified_page")


@pytest.mark.parametrize("name", FORMULAS)
def test_our_formulas_have_the_required_digits_on_every_case_in_every_dtype(name, page_script):
    digits = digits_of(page_script.naive() if name == "naive" else name)
    missing = {(name, record.case, record.dtype) for record in digits if not record.holds}
    assert missing == {exception for exception in page_script.EXCEPTIONS if exception[0] == name}
    assert len({record.case for record in digits}) == FORMULAS[name]
    # Four dtypes, and three gradients beside each output.
    assert len(digits) == 16 * FORMULAS[name]
    for record in digits:
        if record.quantity in ("output", "dv"):
            eps = torch.finfo(getattr(torch, record.dtype)).eps
            kappa = torch.tensor(CASES[record.case].kappa * eps, dtype=torch.float64)
            assert record.required == pytest.approx(-float(kappa.log10()) - SLACK)


def test_a_fault_of_1e_9_in_one_entry_of_any_row_is_seen_in_float64():
    seen = 0
    for case in CASES.values():
        for quantity in QUANTITIES if case.kappa <= 100 else ():
            assert least_digits(case, quantity, case.tensors[quantity])[0] == pytest.approx(15.65, abs=0.01)
            rows = case.tensors[quantity].flatten(end_dim=-2)
            for row in range(len(rows)):
                faulty = rows.clone()
                faulty[row, row % rows.shape[1]] += 1e-9
                digits, required = least_digits(case, quantity, faulty.view_as(case.tensors[quantity]))
                assert digits < required, (case.name, quantity, row)
                seen += 1
    assert seen > 1000


def test_digits_are_absolute_where_the_certified_row_is_0_and_none_where_the_output_is_nan():
    case = CASES["blind-sequence"]
    output = case.tensors["output"]
    noisy = output.clone()
    noisy[1, 0, 2, 3] = 1e-5
    assert least_digits(case, "output", noisy)[0] == pytest.approx(5)
    noisy[1, 0, 2, 3] = torch.nan
    assert least_digits(case, "output", noisy)[0] == NO_DIGITS


def test_a_function_is_measured_on_the_cases_that_it_declares():
    plain = digits_of(attend)
    assert all(record.holds for record in plain) and {r.dtype for r in plain} >= {"float64", "bfloat16"}
    left_out = {"causal", "masked", "grouped", "negative-scale", "relu"}
    assert not left_out & {record.case for record in plain}
    sdpa = adapt(torch.nn.functional.scaled_dot_product_attention, signature="sdpa", causal=True, cross=True)
    declared = {record.case for record in digits_of(sdpa)}
    assert {"causal", "grouped", "negative-scale"} <= declared and "masked" not in declared


def test_an_error_of_a_function_has_no_digits_and_an_approximation_no_certified_values():
    def raising(q, k, v):
        raise ValueError("no")

    record = digits_of(raising)[0]
    assert not record.holds and record.digits == NO_DIGITS and "ValueError: no" in record.detail
    assert all(record.dtype in ("float32", "float64") for record in digits_of(raising))
    with pytest.raises(UnsupportedError, match="'nystrom' has no certified values"):
        digits_of("nystrom")


def test_the_page_has_the_stored_digits_and_a_reader_that_runs(page_script, monkeypatch, capsys):
    page = (ROOT / "docs/certified.md").read_text(encoding="utf-8")
    stored = json.loads(page_script.DIGITS.read_text(encoding="utf-8"))
    assert page == page_script.page(stored), "run: python docs/certified_page.py page"
    assert stored["rows"].keys() == page_script.formulas().keys()
    missing = {f"{case}, {dtype}" for _, case, dtype in page_script.EXCEPTIONS}
    assert {case for row in stored["rows"].values() for case in row["missing"]} == missing
    (reader,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    assert len([*filter(None, reader.splitlines())]) == 10 and "efficient_attn" not in reader
    monkeypatch.chdir(FILE.parent)
    exec(reader, {})
    errors = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(errors) == 2 and max(errors) < 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_kernels_of_pytorch_have_the_required_digits(page_script):
    for label, formula in page_script.formulas().items():
        if not label.startswith("`"):
            assert [record for record in digits_of(formula) if not record.holds] == [], label


def test_every_case_says_in_the_file_what_it_is():
    with safe_open(FILE, framework="pt") as file:
        for text in file.metadata().values():
            assert json.loads(text).keys() == {"kind", "scale", "causal", "kappa", "about"}
