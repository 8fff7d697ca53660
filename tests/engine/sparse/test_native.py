"""terms.c, where there is a compiler; and nothing where there is none."""

import pytest
import torch

from clipline.engine.sparse import native


@pytest.fixture(autouse=True)
def _compiled_anew():
    native.compiled.cache_clear()
    yield
    native.compiled.cache_clear()


def test_without_a_compiler_there_is_no_library(monkeypatch):
    native.compiled.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert native.compiled(torch.float32) is None
    native.compiled.cache_clear()
    monkeypatch.setenv("CC", "false")  # a compiler that fails
    assert native.compiled(torch.float32) is None
    native.compiled.cache_clear()


@pytest.mark.parametrize(
    "script", ["exit 1", "exit 0", 'echo "int main;" > x.c', 'cc -shared -o "$6" -x c /dev/null 2>/dev/null || exit 1']
)
def test_a_compiler_that_is_none_is_done_without(tmp_path, monkeypatch, script):
    compiler = tmp_path / "broken-cc"
    compiler.write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert native.compiled(torch.float64) is None


def test_the_environment_may_switch_it_off(monkeypatch):
    monkeypatch.setenv("CLIPLINE_NATIVE", "0")
    assert native.compiled(torch.float64) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_other_types_have_no_library(dtype):
    assert native.compiled(dtype) is None


def test_what_does_not_lie_in_a_row_is_not_handed_to_c():
    assert native.address(torch.zeros(3)) > 0
    with pytest.raises(ValueError, match="contiguous"):
        native.address(torch.zeros(3, 2).T)
