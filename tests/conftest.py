"""What every test stands on: checked shapes in tests of `ops`, plots without a screen, one thread."""

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

try:
    import fcntl
except ImportError:  # Windows, where such tests run beside the others.
    fcntl = None

THREADS = 1

# One algorithm serves several backends: what holds for every backend is tried on one of a kind at once, and
# on the others by `pytest -m slow`.
OF_A_KIND = {
    *("exact-dense", "performer-hyperbolic", "performer-oprf", "performer-full"),
    *("linear-relu", "linear-elu", "linear-hedgehog", "linear-taylor-1", "linear-taylor-2"),
}


@pytest.fixture
def short_decoder(monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of tokens to which the shipped decoder is cut, half of them in its shorter layer."""
    from efficient_attn.measure import inputs
    from efficient_attn.measure.inputs import SHIPPED, Activations, Captured, shipped

    def cut(text: int) -> Captured:
        captured = shipped(text)
        lengths = {18: 48, 19: 96} if text == SHIPPED["decoder"] else {}
        layers = {
            layer: Activations(*(tensor[..., :length, :] for tensor in captured.layers[layer]))
            for layer, length in lengths.items()
        }
        return replace(captured, layers=layers or captured.layers)

    monkeypatch.setattr(inputs, "shipped", cut)
    return 96


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.name == "test_reproducible.py" and OF_A_KIND & set(map(str, params.values())):
            item.add_marker("slow")


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Let a test run beside the others of this folder's processes, or alone."""
    if fcntl is None:
        yield
        return
    with open(folder / "gate", "w") as gate, open(folder / "running", "w") as running:
        # A test that waits to run alone holds the gate, so that no other test begins before it.
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # A process that the test left behind holds the files open.
            fcntl.flock(running, fcntl.LOCK_UN)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not hasattr(item.config, "workerinput"):
        return (yield)
    # The workers of one run have their temporary folders side by side.
    with turn(Path(item.config.option.basetemp).parent, alone=item.get_closest_marker("serial") is not None):
        return (yield)


def pytest_collection_finish() -> None:
    # Whoever counts bytes collects garbage first, and need not look through all that was imported.
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    # The children that some tests start inherit this too.
    os.environ["MPLBACKEND"] = "Agg"
    # Ctrl-C interrupts here too where a shell in the background, which ignores it, started the tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    import torch

    torch.set_num_threads(THREADS)
    # torch.compile stumbles over checked shapes.
    if config.getoption("markexpr") not in ("compile", "gpu"):
        # Must come before anything imports `ops`, hence not in a fixture.
        from jaxtyping import install_import_hook

        install_import_hook("efficient_attn.ops", "beartype.beartype")


# Tests marked `gpu` take few large steps on the CPU too; many small ones are the path with all its borders.
STEPS = ("cpu", pytest.param("few large steps", marks=pytest.mark.slow), "many small steps")


@pytest.fixture(params=STEPS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of the CPU, and that of other devices in steps of all that fits or of one part each."""
    if request.param != "cpu":
        monkeypatch.setenv("EFFICIENT_ATTN_KERNELS", "torch")
    if request.param == "many small steps":
        monkeypatch.setattr("efficient_attn.ops.paths.HELD", 1)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of tests marked `gpu`; on request the CPU, on the path of other devices."""
    import torch

    if torch.cuda.is_available():
        # The tests check the kernels, whatever `gpu-check` found or did not look for.
        from efficient_attn.ops import verdict

        first = {kernel: tiles[0] for kernel, tiles in verdict.TILES.items()}
        with verdict.on_trial(first):
            yield "cuda"
        return
    if os.environ.get("EFFICIENT_ATTN_GPU_TESTS") != "cpu":
        pytest.skip("torch sees no CUDA device; EFFICIENT_ATTN_GPU_TESTS=cpu runs these tests on the CPU")
    monkeypatch.setenv("EFFICIENT_ATTN_KERNELS", "torch")
    yield "cpu"


@pytest.fixture
def cuda(device: str) -> str:
    """The device of tests of CUDA itself."""
    if device == "cpu":
        pytest.skip("CUDA itself is tested: graphs, streams or the clock of a device")
    return device


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round of a time ends after milliseconds, for runs whose times nobody reads."""
    monkeypatch.setattr("efficient_attn.runs.engine._ROUND_S", 0.001)


@pytest.fixture
def unisolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands measure in this process, which starts no other."""
    monkeypatch.setattr("efficient_attn.measure.isolation.DEFAULT_ISOLATION", "none")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs leave no drawings, which take longer than everything else of a small one."""
    monkeypatch.setattr("efficient_attn.runs.results.write_all", lambda run, folder, title: [])


@pytest.fixture(autouse=True)
def shapes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes are checked in tests of `ops` and where a test asks for it: that doubles the time of calls."""
    import jaxtyping

    if request.path.parent.name != "ops":
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def misbehaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another folder to run in, with `own.py:…` that end, block or flood their process."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).parent / "helpers" / "misbehaving_backends.py", "own.py")


@pytest.fixture
def called_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another folder to run in, with `models.py:…` that make models or fail to."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).parent / "helpers" / "called_models.py", "models.py")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The names and options of the backends that are called, in order."""
    from efficient_attn.backend import Backend

    calls: list[Any] = []
    forward = Backend.forward

    def count(self: Any, *args: Any, **named: Any) -> Any:
        calls.append((self.spec.name, self.options))
        return forward(self, *args, **named)

    monkeypatch.setattr(Backend, "forward", count)
    return calls


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny BERT of transformers, to be left as it is."""
    from hf_models import bert, saved

    return saved(bert(), tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny GPT-2 of transformers, to be left as it is."""
    from hf_models import gpt2, saved

    return saved(gpt2(), tmp_path_factory.mktemp("decoder"))


@pytest.fixture
def given_times(monkeypatch: pytest.MonkeyPatch, undrawn: None) -> None:
    """Times of models as in hf_advice.TIMES_S on an idle machine whose products are of float32."""
    from hf_advice import timed

    monkeypatch.setattr("efficient_attn.studies.swap.measure.cost", timed)
    monkeypatch.setattr("efficient_attn.studies.advise.precision.bfloat16_instructions", lambda: "none")
    monkeypatch.setattr("efficient_attn.runs.run.between", lambda *moments, **named: {})


@pytest.fixture
def advised(encoder: Path, given_times: None) -> Any:
    """The advice for the tiny BERT at a cosine of 0.9."""
    from hf_advice import advice

    return advice(encoder)
