"""A GPU gives what the CPU gives. These tests need one and say so where there is none."""

import numpy as np
import pytest
import torch
from samples import LOCAL, Observer, cross_entropy, flat_training, one_round, small_population
from torch import nn

from clipline import QuantileClip, ServerAdam, ServerNormalised, ServerSGD
from clipline.training.checkpoint import load_checkpoint, save_checkpoint

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def run(device, server, model, **changes):
    settings = {"rounds": 8, "cohort_size": 20, "noise_multiplier": 0.4, "clip": QuantileClip(start=0.01), **changes}
    return flat_training(
        model, cross_entropy, small_population(), local=LOCAL, seed=1, server=server, device=device, **settings
    ).run()


@needs_cuda
@pytest.mark.parametrize("server", [ServerSGD(0.5), ServerAdam(0.05), ServerNormalised(0.05)])
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_a_gpu_trains_the_same_model_as_the_cpu(server, sampling):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    cpu, gpu = (run(device, server, model, sampling=sampling) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(gpu.state.params.cpu().numpy(), cpu.state.params.numpy(), rtol=1e-8, atol=1e-10)
    assert [r.clip for r in gpu.reports] == pytest.approx([r.clip for r in cpu.reports], rel=1e-8)
    assert {p.device.type for p in gpu.model.parameters()} == {"cpu"}  # the result is handed back on the CPU


@needs_cuda
def test_dropout_on_a_gpu_is_replayable_and_leaves_the_callers_generator_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    before = torch.cuda.get_rng_state()
    first, again = (run("cuda", ServerSGD(), model).state.params for _ in range(2))
    assert torch.allclose(first, again, rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.cuda.get_rng_state(), before)


@needs_cuda
def test_a_run_on_a_gpu_resumes_from_its_checkpoint(tmp_path):
    model = nn.Linear(6, 3).double()
    states = {}
    settings = {"local": LOCAL, "seed": 1, "rounds": 6, "cohort_size": 20, "noise_multiplier": 0.4, "device": "cuda"}
    whole = flat_training(model, cross_entropy, small_population(), **settings).run(
        [Observer(lambda report, state: states.setdefault(state.round_index, state))]
    )
    save_checkpoint(tmp_path / "c.safetensors", states[3])
    state = load_checkpoint(tmp_path / "c.safetensors", torch.device("cuda"))
    rest = flat_training(model, cross_entropy, small_population(), **settings).run(state=state)
    assert torch.allclose(rest.state.params, whole.state.params, rtol=1e-9)
    assert rest.guarantee == whole.guarantee


@needs_cuda
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_rounds_on_a_gpu_go_on_from_any_state_and_nothing_of_another_round_gets_in(precision):
    """A round's clip and fraction are read late; whoever goes on from another state must not get those."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))

    def losses(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"].long(), reduction="none")

    settings = {"rounds": 9, "cohort_size": 20, "noise_multiplier": 0.4, "local": LOCAL, "seed": 1, "device": "cuda"}
    made = flat_training(model, losses, small_population(), precision=precision, **settings)
    states = [made.init()]
    for _ in range(5):
        states.append(one_round(made, states[-1])[0])
    for number in (0, 1, 2, 0, 3, 4, 1, 2):
        state, release = one_round(made, states[number])
        torch.cuda._sleep(10**6 * number)
        torch.testing.assert_close(state.params, states[number + 1].params, rtol=1e-6, atol=1e-7)
        assert state.clip.clip == pytest.approx(states[number + 1].clip.clip, rel=1e-9)
        assert release.fraction_within is not None
