"""Programs are kept by what they compute: the same is compiled once, anything else is not mistaken for it."""

import pytest
import torch
from samples import Uncompiled
from torch import nn

from clipline import LocalSGD
from clipline.engine.core.notices import Notices
from clipline.engine.core.precision import kernels_switched
from clipline.engine.core.problem import SlowEngineWarning
from clipline.engine.core.working_model import WorkingModel
from clipline.engine.gpu.programs import inductor, program_cache
from clipline.engine.gpu.programs.program_cache import Programs
from clipline.engine.gpu.recorded_step import CompiledStep
from clipline.engine.stacked.step import StackStep
from clipline.engine.stacked.vmap_layers import make_stackable


def pull(model, batch):
    """1/2 (w x - 3)^2 of each example."""
    return 0.5 * (model(batch["x"].unsqueeze(-1))[..., 0] - 3.0).square()


def push(model, batch):
    return -pull(model, batch)


class Scaled(nn.Module):
    """A trained weight times one that is not trained."""

    def __init__(self, weight, scale):
        super().__init__()
        self.inner = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.inner.weight, weight)
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x):
        return self.scale * self.inner(x)


@pytest.fixture
def compilations(monkeypatch):
    """The programs that were compiled, by a compiler that leaves a graph as it is."""
    made = []

    def as_it_is(*given):
        made.append(Uncompiled(*given))
        return made[-1]

    monkeypatch.setattr(inductor, "compiled", as_it_is)
    program_cache.forget_programs()
    yield made
    program_cache.forget_programs()


def after_a_step(loss=pull, weight=0.0, scale=1.0, users=2, width=2, programs=None):
    """The users' weights after one step at rate 1 from `weight`, on examples that are all 1."""
    step = compiled_step(Scaled(weight, scale), loss, width, programs)
    return weights_after(step, weight, users, width)


def compiled_step(module, loss=pull, width=2, programs=None):
    step = StackStep(WorkingModel(module, make_stackable=make_stackable), loss, LocalSGD(1.0, width))
    step.per_example = True
    return CompiledStep(step, programs)


def weights_after(step, weight=0.0, users=2, width=2):
    stack = [torch.full((users, 1, 1), weight)]
    keys = torch.zeros(users, 0, 2, dtype=torch.int32)
    batch = {"x": torch.ones(users, width)}
    arguments = stack, keys, batch, torch.ones(users, width, dtype=torch.bool), torch.ones(users)
    step(arguments)
    return stack[0].flatten().tolist()


def test_a_second_training_of_the_same_shape_compiles_nothing_and_starts_from_its_own_weights(compilations):
    assert after_a_step(weight=0.0) == [3.0, 3.0]  # 0 - 1 * (0 - 3)
    assert after_a_step(weight=1.0, users=3) == [3.0, 3.0, 3.0]  # 1 - 1 * (1 - 3)
    assert len(compilations) == 1


def test_another_loss_or_another_width_is_another_program(compilations):
    assert after_a_step() == [3.0, 3.0]
    assert after_a_step(loss=push) == [-3.0, -3.0]
    assert after_a_step(width=3) == [3.0, 3.0]
    assert len(compilations) == 3


def test_weights_that_are_not_trained_are_no_part_of_a_program_and_each_training_has_its_own(compilations):
    assert after_a_step(scale=2.0) == [6.0, 6.0]  # 0 - 2 * (2 * 0 - 3)
    assert after_a_step(scale=4.0) == [12.0, 12.0]
    (only,) = compilations
    assert not list(only.graph.buffers())
    assert not [node for node in only.graph.graph.nodes if node.op == "get_attr"]


def test_the_switch_and_a_training_without_our_kernels_compile_anew(compilations):
    """Without our kernels results are laid out otherwise: a product that is padded for a GPU, say."""
    assert after_a_step(programs=Programs(kept=False)) == after_a_step(programs=Programs(kept=False)) == [3.0, 3.0]
    assert len(compilations) == 2
    assert after_a_step() == [3.0, 3.0]
    with kernels_switched(False):
        assert after_a_step() == after_a_step() == [3.0, 3.0]
    assert len(compilations) == 4


def test_a_training_counts_what_it_made_and_what_it_found(compilations):
    first, second = Programs(), Programs()
    for _ in range(2):
        after_a_step(programs=first)
    after_a_step(programs=second)
    after_a_step(loss=push, programs=second)
    assert (first.counts.programs, first.counts.compiled) == (2, 1)
    assert (second.counts.programs, second.counts.compiled) == (2, 1)


def test_whoever_listens_is_told_before_and_after_compiling_and_not_of_what_is_there(compilations):
    notices, heard = Notices(), []
    with notices.heard_by(lambda reason: heard.append((reason, len(compilations)))):
        after_a_step(programs=Programs(notices=notices))
        after_a_step(programs=Programs(notices=notices))
    after_a_step(loss=push, programs=Programs(notices=notices))  # nobody listens any more
    (before, none_yet), after = heard
    assert before.startswith("compiling, about ")
    assert before.endswith(" s, once")
    assert (none_yet, after) == (0, (None, 1))


def test_a_graph_with_more_to_compile_than_takes_minutes_runs_as_written(compilations, monkeypatch):
    monkeypatch.setattr(inductor, "MOST_COMPILED", 10)
    with pytest.warns(SlowEngineWarning, match=r"cannot be compiled \(\d+ operations to compile: more than 10\)"):
        assert after_a_step() == [3.0, 3.0]
    assert not compilations


def test_few_programs_are_kept_and_the_one_used_last_stays(compilations, monkeypatch):
    monkeypatch.setattr(program_cache, "_MOST", 2)
    for width in (1, 2, 1, 3, 1):  # 2 goes when 3 comes
        after_a_step(width=width)
    assert len(compilations) == 3
    after_a_step(scale=2.0)
    assert len(compilations) == 4


def test_trainings_that_share_a_program_read_their_own_untrained_weights(compilations):
    modules = [Scaled(0.0, 1.0) for _ in range(3)]
    for module in modules:  # a parameter is not copied: the engine reads the caller's memory
        module.scale = nn.Parameter(module.scale, requires_grad=False)
    first, second = (compiled_step(module) for module in modules[:2])
    assert weights_after(first) == weights_after(second) == [3.0, 3.0]
    with torch.no_grad():
        modules[1].scale.mul_(2.0)  # as when adapters are merged into their base
    assert weights_after(first) == [3.0, 3.0]
    assert weights_after(compiled_step(modules[2])) == [3.0, 3.0]
    assert weights_after(compiled_step(modules[1])) == [6.0, 6.0]
    assert len(compilations) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_that_write_can_be_tuned_on_copies_in_the_gpus_memory():
    weights = [torch.zeros(8, 1 << 20, device="cuda"), torch.zeros(8, 3, device="cuda")]
    program_cache._make_room_for_tuning(weights)
    room = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    assert room >= 2 * weights[0].nbytes  # the compiler's rule: copies go elsewhere if they would raise the most
