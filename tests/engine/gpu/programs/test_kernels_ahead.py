"""Kernels that are compiled in threads before training: what is run there, and that nothing else changes."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clipline import Compute, FastParts, LocalSGD, Population, Privacy, Training
from clipline.engine.gpu.programs import kernels_ahead
from clipline.engine.gpu.programs.kernels_ahead import compile_ahead

CORE = torch.device("cpu")
NAMED = frozenset(kernels_ahead._MANY_KERNELS)
calls: list[tuple[str, tuple[int, ...]]] = []


@torch.library.custom_op("clipline_tests::doubled_in_a_thread", mutates_args=())
def doubled(values: Tensor) -> Tensor:
    """An operation that notes where it runs."""
    calls.append((threading.current_thread().name, tuple(values.shape)))
    return 2 * values


@doubled.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values)


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    monkeypatch.setattr(kernels_ahead, "_MANY_KERNELS", {"clipline_tests.doubled_in_a_thread"})


def test_an_operation_runs_in_a_thread_once_for_each_shape_and_plain_numbers_stand_for_its_result() -> None:
    seen = list[Tensor]()

    def step() -> None:
        seen.extend(doubled(torch.ones(size)) for size in (3, 3, 4))

    compile_ahead(CORE, step)
    assert sorted(shape for _, shape in calls) == [(3,), (4,)]
    assert all(name.startswith("clipline-kernels") for name, _ in calls)
    assert [one.tolist() for one in seen[:2]] == [[-1.0, 0.0, 1.0]] * 2
    assert seen[2].norm() > 0  # a length that may be divided by
    assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]  # afterwards it computes again, here
    assert calls[-1][0] == threading.current_thread().name


def test_other_operations_are_computed_and_calls_beside_the_step_are_made() -> None:
    seen = list[object]()
    compile_ahead(CORE, lambda: seen.append((torch.ones(2) + 1).tolist()), lambda: seen.append("beside"))
    assert sorted(map(str, seen)) == ["[2.0, 2.0]", "beside"]


def test_a_kind_of_step_is_compiled_once_in_a_process() -> None:
    seen = list[str]()
    for kind in ("one kind", "one kind", "another", None, None):
        compile_ahead(CORE, lambda: None, lambda: seen.append("beside"), kind=kind)
    assert len(seen) == 4


class StoredMarks:
    """Triton's cache, as far as it is used here; the GPU is made up too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files = set[str]()
        made_up = types.ModuleType("triton.runtime.cache")
        made_up.get_cache_manager = self.at  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
        monkeypatch.setitem(sys.modules, "triton.runtime", types.ModuleType("triton.runtime"))
        monkeypatch.setitem(sys.modules, "triton.runtime.cache", made_up)
        monkeypatch.setattr(kernels_ahead, "_done", set())
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a made-up GPU")

    def at(self, key: str) -> types.SimpleNamespace:
        bytes.fromhex(key)  # as Triton wants it
        return types.SimpleNamespace(
            get_file=lambda name: f"{key}/{name}" if f"{key}/{name}" in self.files else None,
            put=lambda data, name: self.files.add(f"{key}/{name}"),
        )


def test_a_later_process_compiles_ahead_what_is_not_marked_in_tritons_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, gpu, taken = StoredMarks(monkeypatch), torch.device("cuda"), list[str]()

    def process(kind: str) -> None:
        kernels_ahead._done.clear()
        compile_ahead(gpu, lambda: taken.append(kind), kind=kind)

    for kind in ("one", "one", "another"):
        process(kind)
    assert taken == ["one", "another"]
    with monkeypatch.context() as changed:  # another version of the code writes other kernels
        changed.setattr(kernels_ahead, "code_versions", lambda: ["another"])
        process("one")
    stored.files.clear()  # somebody has emptied the cache
    process("one")
    assert taken == ["one", "another", "one", "one"]


def test_a_step_that_fails_and_a_cache_that_cannot_be_written_leave_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, gpu = StoredMarks(monkeypatch), torch.device("cuda")

    def fails(*_: object) -> None:
        raise OSError("no space left")

    compile_ahead(gpu, fails, kind="one")
    assert not stored.files
    monkeypatch.setattr(sys.modules["triton.runtime.cache"], "get_cache_manager", fails)
    compile_ahead(gpu, lambda: None, kind="another")


def test_errors_are_left_for_the_step_itself() -> None:
    def fails() -> None:
        raise RuntimeError("seen where it is run in earnest")

    compile_ahead(CORE, fails, fails)
    assert doubled(torch.ones(1)).tolist() == [2.0]  # computed again: the mode has been left


def test_the_backward_pass_is_compiled_too() -> None:
    def forget(ctx, inputs, output):  # type: ignore[no-untyped-def]
        pass

    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return doubled(grad)

    doubled.register_autograd(backward, setup_context=forget)
    values = torch.ones(5, requires_grad=True)
    compile_ahead(CORE, lambda: torch.autograd.grad(doubled(values[:4]).sum(), values))
    assert [shape for _, shape in calls] == [
        (4,),
        (4,),
    ]  # forward, and backward with another layout
    assert values.grad is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_after_it_a_training_compiles_nothing_and_trains_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()  # the operations of ours again
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # nothing is stored yet
    from clipline.engine.gpu.kernels import convolution_triton

    def compiled() -> int:
        caches = convolution_triton._forward.device_caches[torch.cuda.current_device()]
        return len(caches[0])

    generator = torch.Generator().manual_seed(0)
    users = torch.arange(40).repeat_interleave(5).numpy()
    x = torch.randn(200, 3, 12, 12, generator=generator).numpy()
    population = Population.from_arrays(users, x=x, y=(x.mean(axis=(1, 2, 3)) > 0).astype("int64"))

    def train(ahead: bool) -> Tensor:
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 48, 3), torch.nn.GroupNorm(4, 48), torch.nn.Flatten(), torch.nn.Linear(4800, 2)
        )
        loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")  # noqa: E731
        fast = FastParts(kernels_ahead=ahead, compiled_steps="never")
        training = Training(
            model, loss, population, rounds=2, cohort_size=10, local=LocalSGD(lr=0.1, batch_size=5), seed=3,
            privacy=Privacy(noise_multiplier=1.0), compute=Compute(device="cuda", precision="bf16", fast=fast),
        )  # fmt: skip
        made = compiled()
        state = training.run().state
        assert compiled() == made  # while it was made
        return state.params

    torch.testing.assert_close(train(True), train(False), rtol=0, atol=0)


def test_every_operation_that_is_named_exists() -> None:
    from clipline.engine.gpu.kernels import convolution, group_norm

    assert convolution.stacked_conv is not None
    assert group_norm.stacked_group_norm is not None
    for name in NAMED:
        assert str(getattr(torch.ops.clipline, name.removeprefix("clipline.")).default) == f"{name}.default"
