"""What every test stands on: checked shapes in `ops`, plots without a screen, one thread."""

import os

import pytest

THREADS = 1


def pytest_configure(config: pytest.Config) -> None:
    # The children that some tests start inherit this too.
    os.environ["MPLBACKEND"] = "Agg"

    import torch

    torch.set_num_threads(THREADS)
    if not _compiles(config):
        # Must come before anything imports `ops`, hence not in a fixture.
        from jaxtyping import install_import_hook

        install_import_hook("efficient_attn.ops", "beartype.beartype")


def _compiles(config: pytest.Config) -> bool:
    """Whether this process runs the compile tests: `torch.compile` stumbles over checked shapes."""
    return config.getoption("markexpr") == "compile"
