"""Fixtures of the tests of interception."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def slow_path() -> Iterator[None]:
    """torch's fused path of nn.TransformerEncoderLayer calls no attention function and rounds elsewhere."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)
