from types import ModuleType

import pytest
import torch
from samples import ROOT, load_script


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """examples/algorithm1.py: the paper in plain NumPy."""
    return load_script(ROOT / "examples" / "algorithm1.py")
