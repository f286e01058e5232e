"""A pytest plugin: whatever torch allocates is NaN, or the largest integer, until somebody writes to it."""

import pytest
import torch


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item):
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
