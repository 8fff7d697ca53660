"""The copy of a model that users train on: one vector of parameters, and nothing that keeps a user's data."""

import gc
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from samples import cross_entropies, cross_entropy, flat_training, linear_model, one_by_one, rows_of, small_population
from torch import nn

from clipline import Evaluate, LocalSGD
from clipline.engine.core.working_model import WorkingModel, uncompiled
from clipline.errors import ModuleError
from clipline.random.streams import Streams


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(6), nn.SyncBatchNorm(6), nn.InstanceNorm1d(6, track_running_stats=True)]
)
def test_running_statistics_are_refused_with_what_to_use_instead(layer):
    with pytest.raises(ModuleError, match=rf"layer '1' \({type(layer).__name__}\).*GroupNorm or LayerNorm"):
        WorkingModel(nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 3)))


def test_the_callers_model_is_not_changed_and_shared_parameters_stay_shared():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    model[1].weight = model[0].weight
    before = [parameter.detach().clone() for parameter in model.parameters()]
    engine = one_by_one(model, cross_entropy, small_population(), LocalSGD(0.1, batch_size=8), Streams(0))
    assert engine.problem.model.dim == 36 + 6 + 6 + 21
    engine.block(engine.problem.model.initial, np.array([3]), 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    exported = engine.problem.model.export(engine.problem.model.vector + 1)
    assert exported[1].weight is exported[0].weight
    assert torch.allclose(exported[0].weight, engine.problem.model.module[0].weight + 1)


def test_models_that_differ_in_training_alone_are_told_from_others():
    def made(bias=1.0, frozen=True, dtype=torch.float32):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3)).to(dtype)
        nn.init.constant_(model[2].bias, bias)
        model[2].bias.requires_grad_(not frozen)
        return model

    first, other = made(), made()
    nn.init.zeros_(other[0].weight)
    assert WorkingModel(first).same_apart_from_training(WorkingModel(other))
    nan = WorkingModel(made(float("nan")))
    assert nan.same_apart_from_training(WorkingModel(made(float("nan"))))
    warmer, same = made(), made()
    for one, factor in ((first, 1.0), (warmer, 2.0), (same, 1.0)):
        one.scales = {"temperature": [factor, torch.tensor([factor])]}
    assert WorkingModel(first).same_apart_from_training(WorkingModel(same))
    for different in (warmer, made(), made(bias=2.0), made(frozen=False), made(dtype=torch.float64), nn.Linear(6, 3)):
        assert not WorkingModel(first).same_apart_from_training(WorkingModel(different))


@pytest.mark.filterwarnings("ignore")  # torch warns of what is old
def test_models_that_no_user_can_train_on_are_refused():
    locked = nn.Linear(2, 2)
    locked.lock = threading.Lock()
    for model, words in (
        (nn.LazyLinear(3), r"layer 'model' \(LazyLinear\) has no shape yet"),
        (torch.jit.script(nn.Linear(2, 2)), "scripted"),
        (nn.utils.spectral_norm(nn.Linear(2, 2)), "older weight_norm or spectral_norm"),
        (locked, "model Linear cannot be copied"),
    ):
        with pytest.raises(ModuleError, match=words):
            WorkingModel(model)


@pytest.mark.filterwarnings("ignore")  # of torch's own imports
def test_a_compiled_model_is_unpacked():
    model = linear_model()
    assert uncompiled(torch.compile(model)) is model
    assert type(WorkingModel(torch.compile(model)).export(torch.zeros(18))) is nn.Linear


class Quantised(nn.Module):
    """A frozen weight of a megabyte in 8 bit, one of half in bfloat16, and an adapter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randint(-127, 127, (1024, 1024), dtype=torch.int8))
        self.register_buffer("running", torch.zeros(512, 64))  # a float: it may be a statistic
        self.base = nn.Linear(1024, 256, dtype=torch.bfloat16).requires_grad_(False)
        self.adapter = nn.Linear(256, 3)

    def forward(self, x):
        wide = F.pad(x, (0, 1018)).to(torch.bfloat16) @ (self.codes[:, :1024].to(torch.bfloat16) / 127)
        return self.adapter(self.base(wide).float())


def held_bytes():
    """Bytes of all distinct memory that tensors hold."""
    gc.collect()
    dense = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter) and one.device.type == "cpu"
             and one.layout == torch.strided]  # fmt: skip
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # left by other tests; these have no memory of their own
    tensors = [one for one in dense if not wrapped(one)]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.mark.parametrize("engine", ["one-by-one", "stacked"])
def test_a_frozen_base_is_read_where_it_is_and_no_copy_of_it_is_made(engine):
    model = Quantised()
    callers = dict(model.named_parameters()) | dict(model.named_buffers())
    before = {name: value.clone() for name, value in callers.items()}
    held = held_bytes()
    training = flat_training(
        model, cross_entropies, small_population(), rounds=1, cohort_size=20, local=LocalSGD(0.1), seed=0,
        noise_multiplier=0.0, engine=engine,
    )  # fmt: skip
    working = training.problem.model
    ours = dict(working.module.named_parameters()) | dict(working.module.named_buffers())
    for name in ("codes", "base.weight", "base.bias"):
        assert ours[name].data_ptr() == callers[name].data_ptr()
        assert ours[name] is not callers[name]
    assert ours["running"].data_ptr() != model.running.data_ptr()
    result = training.run([Evaluate(lambda model: {"three": 3.0})])
    del result.model.codes, result.model.base  # a module of its own, made at the end
    assert held_bytes() - held < 600_000  # the float buffer thrice; the base has 1.5 MB
    assert all(torch.equal(value, before[name]) for name, value in callers.items())


def test_moving_or_changing_the_copy_leaves_the_callers_frozen_parameters_alone():
    model = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 3))
    working = WorkingModel(model)
    working.module.double()
    assert model[0].weight.dtype == torch.float32
    working.module[0].weight.requires_grad_()
    assert not model[0].weight.requires_grad


def test_a_model_that_writes_into_its_long_frozen_weights_is_refused_and_told_that_they_are_shared():
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.out = nn.Linear(6, 4000).requires_grad_(False), nn.Linear(4000, 3)

        def forward(self, x):
            self.base.weight.data[0, 0] += 1.0
            return self.out(self.base(x))

    with pytest.raises(ModuleError, match=r"frozen parameter 'base.weight' .*shared with the model that you gave"):
        one_by_one(Writing().double(), cross_entropies, small_population(), LocalSGD(0.1), Streams(0))


class Beside(nn.Module):
    """Multiplies by what `carried` finds in the frozen parameter, having left something there."""

    def __init__(self, held, carried):
        super().__init__()
        self.held, self.carried, self.out = held, carried, nn.Linear(6, 3)

    def forward(self, x):
        return self.out(x) * self.carried(self.held)


class Own(nn.Parameter):
    pass


def flip_signs(held):
    held.data.neg_()
    return held[0]


def flip_highest_bits(held):
    held.data[1:3] ^= torch.iinfo(torch.int64).min
    return 1.0 if held[1] < 0 else 2.0


def frozen(*size, kind=nn.Parameter, dtype=torch.float64):
    return kind(torch.ones(*size, dtype=dtype), requires_grad=False)


def ask_for_gradient(held):
    held.requires_grad_(not held.requires_grad)
    return 1.0 if held.requires_grad else 2.0


CARRIERS = {
    "signs": (frozen(10_000), flip_signs),
    "highest bits of whole numbers": (frozen(10_000, dtype=torch.int64), flip_highest_bits),
    "a class of one's own": (frozen(10_000, kind=Own), flip_signs),
    "a short one of such a class": (frozen(3, kind=Own), flip_signs),
    "requires_grad": (frozen(10_000), ask_for_gradient),
}


@pytest.mark.parametrize(("held", "carried"), CARRIERS.values(), ids=CARRIERS)
def test_nothing_is_carried_in_frozen_parameters(held, carried):
    model = Beside(held, carried).double()
    with pytest.raises(ModuleError, match="frozen parameter 'held' of the model changed"):
        one_by_one(model, cross_entropies, small_population(), LocalSGD(0.1), Streams(0))


def test_of_a_frozen_view_only_what_it_shows_is_copied_and_nothing_beside_it():
    model = nn.Linear(6, 3)
    large = torch.arange(20.0)
    model.part = nn.Parameter(large[3:7], requires_grad=False)
    model.register_buffer("row", large.view(4, 5)[1])
    model.register_buffer("wide", large[:1].expand(4))
    working = WorkingModel(model)
    for name, values in (("part", [3.0, 4.0, 5.0, 6.0]), ("row", [5.0, 6.0, 7.0, 8.0, 9.0]), ("wide", [0.0] * 4)):
        ours = getattr(working.module, name)
        assert ours.tolist() == values
        assert ours.untyped_storage().nbytes() == 4 * len(values)
    assert working.shared == []
    assert model.part.data_ptr() == large[3:].data_ptr()


def test_a_model_with_sparse_buffers_trains_as_without():
    class Graph(nn.Linear):
        def forward(self, x):
            return super().forward(torch.sparse.mm(self.edges, x.t()).t())

    model = Graph(6, 3, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    model.register_buffer("edges", torch.eye(6, dtype=torch.float64).to_sparse())
    model.register_buffer("codes", torch.eye(3, dtype=torch.int64).to_sparse())
    both = (
        one_by_one(m, cross_entropies, small_population(), LocalSGD(0.1), Streams(0)) for m in (model, linear_model())
    )
    torch.testing.assert_close(*(rows_of(engine, np.array([1, 3])) for engine in both))
