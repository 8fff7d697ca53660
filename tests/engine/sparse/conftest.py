import pytest
import torch

from clipline.engine.sparse import native


@pytest.fixture(params=[True, False], ids=["C", "torch"])
def compile_c(request):
    """Both ways to do it; the first is there only where there is a compiler."""
    if request.param and native.compiled(torch.float64) is None:
        pytest.skip("needs a C compiler")
    return request.param


@pytest.fixture
def library(compile_c):
    """terms.c for a type, or None where torch's operations are to be used."""
    return native.compiled if compile_c else lambda dtype: None
