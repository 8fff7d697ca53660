import gc
import inspect
import os
import signal
import sys
from collections.abc import Generator
from types import ModuleType

# Tests run in a process a core. More threads would wait for each other, also in the programs that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests that ask for two threads on cores that are taken would spin while they wait for each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell lets its background jobs ignore Ctrl-C, and tests of what Ctrl-C does would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from hypothesis import HealthCheck, settings
from samples import ROOT, CommandLine, Uncompiled, load_script

from clipline.cli import main
from clipline.errors import WorkerError
from clipline.training.curves import draw_curves

# A busy machine is no failure, and every run draws the same examples.
settings.register_profile("clipline", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("clipline")


def pytest_collection_finish() -> None:
    """Leave what collecting made out of every later garbage collection: it is large and lives to the end."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Beside a GPU, torch's autograd cannot be used in a process forked after it was used: skip what needs both."""
    try:
        return (yield)
    except (WorkerError, AssertionError) as error:
        if torch.cuda.is_available() and "Autograd-and-Fork" in str(error):
            pytest.skip("torch cannot fork after autograd beside a GPU: run with CUDA_VISIBLE_DEVICES= to test workers")
        raise


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are traced but not compiled."""
    monkeypatch.setattr("clipline.engine.gpu.programs.inductor.compiled", Uncompiled)


@pytest.fixture
def narrow_resnet(monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR-100's network with all its layers and a tenth of its 11 million parameters."""
    monkeypatch.setattr("clipline_paper.tasks.cifar100.WIDTHS", (32, 32, 32, 64, 64, 96, 96, 128, 128))


@pytest.fixture
def real_curves() -> None:
    """Ask for this where a run directory shall hold the figure itself."""


@pytest.fixture(autouse=True)
def _no_curves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run directories get an empty file in the place of the figure, which takes longer to draw than most runs here."""
    if "real_curves" in request.fixturenames:
        return

    def drawn(*args: object, **kwargs: object) -> None:
        inspect.signature(draw_curves).bind(*args, **kwargs).arguments["path"].touch()

    monkeypatch.setattr("clipline.training.run_directory.draw_curves", drawn)


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """examples/algorithm1.py: the paper in plain NumPy."""
    return load_script(ROOT / "examples" / "algorithm1.py")


@pytest.fixture
def clipline(monkeypatch, capsys, tmp_path):
    """The command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLIPLINE_DATA", raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["clipline", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return CommandLine(run)
