import pytest
import torch
from samples import Mixed, cross_entropies, flat_training, one_by_one, one_round, population_of, request, rows_of

from clipline import LocalSGD
from clipline.engine.core.precision import PRECISIONS, precision_context
from clipline.engine.stacked.trainer import Stacked
from clipline.random.streams import Streams

CPU = torch.device("cpu")
USERS = torch.arange(5).numpy()


def engine(precision, stacked):
    torch.manual_seed(0)
    population = population_of([9, 0, 4, 1, 6], features=16)
    plain = one_by_one(Mixed(), cross_entropies, population, LocalSGD(0.5, 4, 2), Streams(0), precision=precision)
    return Stacked(plain, 5) if stacked else plain


@pytest.mark.parametrize("stacked", [False, True])
def test_bf16_on_a_processor_core_is_near_float32_and_keeps_its_types(stacked):
    exact = rows_of(engine("float32", stacked), USERS)
    rough = engine("bf16", stacked)
    rows = rows_of(rough, USERS)
    assert rows.dtype == rough.problem.model.vector.dtype == torch.float32
    assert all(param.dtype == torch.float32 for param in rough.problem.model.module.parameters())
    error = (rows - exact).norm(dim=1)[[0, 2, 3, 4]] / exact.norm(dim=1)[[0, 2, 3, 4]]
    assert error.max() < 0.1
    assert error.min() > 1e-5  # it is not float32 under another name


@pytest.mark.parametrize("stacked", [False, True])
def test_tf32_on_a_processor_core_is_float32(stacked):
    assert torch.equal(rows_of(engine("tf32", stacked), USERS), rows_of(engine("float32", stacked), USERS))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_release_is_float64_and_parameters_keep_their_type_in_any_precision(precision):
    run = flat_training(
        Mixed(), cross_entropies, population_of([9, 0, 4, 1, 6], features=16), precision=precision, engine="stacked",
        delta=0.1, rounds=2, cohort_size=3, local=LocalSGD(0.5, 4), seed=0, noise_multiplier=0.2,
    )  # fmt: skip
    state, release = one_round(run)
    assert (release.mean.dtype, state.params.dtype) == (torch.float64, torch.float32)
    assert {param.dtype for param in run.run().model.parameters()} == {torch.float32}


def flags():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.fixture(params=[(False, True), (True, False)])
def before(request):
    was = flags()
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = request.param
    yield request.param
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = was


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_callers_switches_are_set_inside_and_given_back_also_after_a_mistake(before, precision):
    with precision_context(precision, CPU):
        assert flags() == ((False, False) if precision == "float32" else (True, True))
        assert torch.is_autocast_enabled("cpu") == (precision == "bf16")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    assert flags() == before
    assert not torch.is_autocast_enabled("cpu")

    def mistaken():
        with precision_context(precision, CPU):
            raise KeyError(precision)

    with pytest.raises(KeyError, match=precision):
        mistaken()
    assert flags() == before
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("stacked", [False, True])
def test_local_training_gives_the_switches_back(before, stacked):
    trainer = engine("bf16", stacked)
    blocks = trainer.train([request(trainer.problem.model.initial, USERS)])
    next(blocks)
    assert flags() == before  # between two blocks too
    assert not torch.is_autocast_enabled("cpu")


def newer():
    """Torch's newer names of the same switches; it refuses to read the older ones where the two disagree."""
    backends = torch.backends
    return backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_caller_may_use_torchs_newer_names_and_has_them_back(precision):
    was = flags()
    torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with precision_context(precision, CPU):
            assert newer() == (("ieee",) * 3 if precision == "float32" else ("tf32",) * 3)
            assert flags() == ((False, False) if precision == "float32" else (True, True))
        assert newer() == ("tf32",) * 3
    finally:
        torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = was


def test_on_processor_cores_a_callers_rougher_products_are_not_used_and_stay():
    was = flags()
    torch.set_float32_matmul_precision("medium")
    try:
        with precision_context("float32", CPU):
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.mkldnn.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = was
