import pytest
import torch

from clipline.engine.sparse import native


@pytest.fixture(params=["C", "torch"])
def way(request, monkeypatch):
    """Both ways to do it; the first is there only where there is a compiler."""
    native.compiled.cache_clear()
    if request.param == "torch":
        monkeypatch.setenv("CLIPLINE_NATIVE", "0")
    elif native.compiled(torch.float64) is None:
        pytest.skip("needs a C compiler")
    yield request.param
    native.compiled.cache_clear()
