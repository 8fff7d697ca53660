"""Compiled by torch: a program computes what the step does, for the numbers of users that it is for, and no others."""

import pytest
import torch

from clipline.engine.gpu.programs import inductor, program_cache, repeats
from clipline.engine.gpu.programs.program_cache import Programs
from clipline.engine.gpu.recorded_step import traced


# Operations of their own: what the compiler writes around them needs no C++ compiler, which takes half a minute.
@torch.library.custom_op("clipline::of_a_test", mutates_args={"weights"})
def move(weights: torch.Tensor, table: torch.Tensor, rates: torch.Tensor) -> None:
    weights.sub_(torch.mm(weights, table) * rates.view(-1, 1))


@move.register_fake
def _(weights, table, rates):
    pass


@torch.library.custom_op("clipline::of_a_test_by_number", mutates_args={"weights"})
def move_by_number(weights: torch.Tensor, table: torch.Tensor, rates: torch.Tensor) -> None:
    move(weights, table, rates)


@move_by_number.register_fake
def _(weights, table, rates):
    """The compiler has to know how many users there are, as for a convolution with a group for each; or their range."""
    assert range(weights.shape[0]) if table.shape[1] == 5 else weights.shape[0] > 4 or weights.shape[0] < 9


@torch.library.custom_op("clipline::of_a_test_layer", mutates_args=())
def layer(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.tanh(hidden + weights)


@layer.register_fake
def _(hidden, weights):
    return torch.empty_like(hidden)


def step(scale, operation=move, width=4):
    """Every user's weights times a constant, and a step along it."""
    table = torch.full((width, width), scale)

    def moved(stack, rates):
        operation(stack[0], table, rates)

    return moved


def after(program, users, width=4):
    """Weights of so many users after a step."""
    weights = torch.arange(users * 1.0 * width).view(users, width)
    program([weights], torch.linspace(0.0, 1.0, users))
    return weights.tolist()


def prepared(moved, width=4):
    given = [torch.zeros(3, width)], torch.ones(3)
    programs = Programs()
    program = programs.program(traced(moved, given), given)
    program.prepare(*given)
    return programs, program


def written(moved, users, width=4):
    return after(moved, users, width)


@pytest.fixture(autouse=True)
def _no_programs():
    program_cache.forget_programs()
    yield
    program_cache.forget_programs()


def test_a_program_computes_what_the_step_does_and_reads_each_trainings_own_constants():
    for scale, compiled in ((2.0, 1), (5.0, 0)):
        programs, program = prepared(step(scale))
        assert programs.counts.compiled == compiled
        assert [after(program, users) for users in (3, 7)] == [written(step(scale), users) for users in (3, 7)]


@pytest.mark.parametrize(("width", "versions", "any_number"), [(5, 3, False), (4, 2, True)])
def test_a_program_that_serves_some_numbers_of_users_is_run_for_no_other(width, versions, any_number):
    """Width 5: one number each. Width 4: up to four users, or more."""
    moved = step(2.0, move_by_number, width)
    programs, program = prepared(moved, width)
    for users in (3, 5, 7, 3, 4) if any_number else (3, 5, 7, 3):
        assert after(program, users, width) == written(moved, users, width)
    assert program.program.any_number == any_number
    assert programs.counts.compiled == versions


def layers(table):
    """Ten layers, and a step of each along what they have made."""

    def moved(stack, rates):
        hidden = [stack[0]]
        for weights in stack:
            hidden.append(hidden[-1])
            for _ in range(5):
                hidden[-1] = layer(hidden[-1], weights)
        for weights in stack:
            move(weights, table, layer(hidden[-1][:, 0], rates))

    return moved


def test_parts_that_repeat_are_compiled_once(monkeypatch):
    monkeypatch.setattr(repeats, "_LARGE", 0)
    monkeypatch.setattr(repeats, "_SAVED", 9)
    compilations = []
    artifact = inductor._artifact
    monkeypatch.setattr(inductor, "_artifact", lambda *given: compilations.append(given) or artifact(*given))
    given = [torch.zeros(3, 4) for _ in range(10)], torch.ones(3)
    moved, programs = layers(torch.full((4, 4), 2.0)), Programs()
    program = programs.program(traced(moved, given), given)
    for users in (3, 7):
        ours, expected = ([torch.linspace(-1, 1, users * 4).view(users, 4) for _ in range(10)] for _ in range(2))
        rates = torch.linspace(0, 1, users)
        program(ours, rates)
        moved(expected, rates)
        assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))
        assert not torch.equal(ours[9], torch.linspace(-1, 1, users * 4).view(users, 4))
    assert programs.counts.compiled == 1
    assert 2 <= len(compilations) <= 4  # layers, steps, perhaps what lies between: not all twenty


def fails(weights, *others):
    weights.add_(1.0)
    raise RuntimeError("no such kernel")


def test_a_new_program_that_fails_half_way_leaves_the_weights_as_they_were(monkeypatch):
    monkeypatch.setattr(inductor, "compiled", lambda graph, inputs, by_user: inductor.Compiled(fails, "True"))
    _, program = prepared(step(1.0))
    weights = torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="no such kernel"):
        program([weights], torch.ones(3))
    assert torch.equal(weights, torch.ones(3, 4))
    monkeypatch.setattr(program_cache, "_MOST_COPIED", 8)
    _, program = prepared(step(1.0, width=5), 5)
    with pytest.raises(program_cache.UnfinishedStepError, match="start again, with FastParts"):  # not taken twice
        program([torch.ones(3, 5)], torch.ones(3))


def test_under_another_default_type_the_same_graph_is_another_program():
    def made(weights):
        return torch.zeros(2) + weights

    graph, given = torch.fx.symbolic_trace(made), [torch.ones(2)]
    before = program_cache.fingerprint(graph, given)
    torch.set_default_dtype(torch.float64)
    try:
        assert program_cache.fingerprint(graph, given) != before
    finally:
        torch.set_default_dtype(torch.float32)
