"""A keyword that belongs to a part of a training is refused with its place."""

import inspect

import pytest
import torch
from samples import cross_entropies, small_population

from clipline import LocalSGD, Privacy, SettingError, Training

GIVEN = {"rounds": 2, "cohort_size": 20, "local": LocalSGD(0.1)}


@pytest.mark.parametrize(
    ("keyword", "place"),
    [
        ({"epsilon": 4}, "epsilon=4 is no argument of Training but of Privacy: give privacy=Privacy(epsilon=4)"),
        ({"client_lr": 0.1}, "give local=LocalSGD(lr=0.1)"),
        ({"quantile": 0.7}, "give clip=QuantileClip(quantile=0.7)"),
        ({"server_lr": 0.7}, "give server=ServerSGD(lr=0.7)"),
        ({"device": "cuda"}, "give compute=Compute(device='cuda')"),
        ({"cohort": 5}, "cohort=5 is no argument of Training, nor of its parts: did you mean 'cohort_size'?"),
        ({"eps": 4}, "eps=4 is no argument of Training but of Privacy: give privacy=Privacy(epsilon=4)"),
        ({"learning_rate": 0.1}, "give local=LocalSGD(lr=0.1)"),
        ({"max_grad_norm": 1.0}, "max_grad_norm=1.0 is no argument of Training: give clip=FixedClip(1.0), or leave it"),
        ({"clip_norm": 1.0}, "give clip=FixedClip(1.0)"),  # not that of LocalSGD, which protects nobody
        ({"n_users": 900}, "give privacy=Privacy(population_size=900)"),
        ({"num_rounds": 9}, "did you mean 'rounds'?"),
        ({"data": torch.tensor([7781])}, "data=<Tensor> is no argument of Training"),
    ],
)
def test_a_misplaced_keyword_is_told_its_place_even_where_the_part_is_missing(keyword, place):
    with pytest.raises(SettingError) as error:
        Training(torch.nn.Linear(6, 3), cross_entropies, small_population(), **GIVEN, **keyword)
    assert place in str(error.value)


def test_other_mistakes_in_a_call_and_the_signature_stay_pythons_own():
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'privacy'"):
        Training(torch.nn.Linear(6, 3), cross_entropies, small_population(), **GIVEN)
    parameters = inspect.signature(Training).parameters
    assert list(parameters)[:3] == ["model", "loss", "population"]
    assert parameters["privacy"].default is inspect.Parameter.empty
    assert Privacy(epsilon=1.0).noise_source is None
