"""Fixtures of the tests of transformers models."""

import logging

import pytest


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Attaching warns about `from_pretrained`, which only tests of the warning read."""
    caplog.set_level(logging.ERROR, "efficient_attn")
