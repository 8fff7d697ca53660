"""Names of other libraries lead to ours."""

import inspect
import pickle

import pytest

from clipline import Compute, FixedClip, LocalAdam, LocalSGD, Privacy, QuantileClip, ServerSGD, SettingError
from clipline.settings import SETTINGS
from clipline.synonyms import SYNONYMS, meant


def test_every_synonym_leads_to_a_setting_and_is_none_itself():
    assert set(SYNONYMS.values()) <= set(SETTINGS)
    assert not set(SYNONYMS) & set(SETTINGS)


@pytest.mark.parametrize(
    ("made", "keywords", "ours"),
    [
        (Privacy, {"eps": 4}, "epsilon"),
        (Privacy, {"noise_mult": 1.0}, "noise_multiplier"),
        (Privacy, {"n_users": 1000}, "population_size"),
        (Privacy, {"epsilom": 4}, "epsilon"),  # a slip of the finger
        (LocalSGD, {"learning_rate": 0.1}, "lr"),
        (LocalSGD, {"client_lr": 0.1}, "lr"),  # the setting's name on the command line
        (ServerSGD, {"learning_rate": 1.0}, "lr"),
        (FixedClip, {"max_grad_norm": 1.0}, "clip"),
        (QuantileClip, {"target_quantile": 0.5}, "quantile"),
        (Compute, {"num_workers": 2}, "workers"),
    ],
)
def test_a_part_answers_an_unknown_keyword_with_its_own_name_for_it(made, keywords, ours):
    ((name, value),) = keywords.items()
    with pytest.raises(SettingError) as error:
        made(**keywords)
    assert str(error.value) == f"{name}={value} is no argument of {made.__name__}: did you mean {ours!r}?"


def test_a_keyword_that_a_part_has_is_taken_as_it_is():
    assert LocalAdam(0.1, eps=1e-6).eps == 1e-6  # which is no epsilon of privacy
    assert list(inspect.signature(Privacy).parameters)[:2] == ["epsilon", "noise_multiplier"]
    assert pickle.loads(pickle.dumps(LocalSGD(0.1, momentum=0.5))) == LocalSGD(0.1, momentum=0.5)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        FixedClip()


def test_a_synonym_counts_only_where_its_setting_is_known():
    assert meant("eps", ["epsilon", "delta"]) == "did you mean 'epsilon'?"
    assert meant("eps", ["rounds"]) == "choose among rounds"
