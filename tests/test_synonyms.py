"""Names of other libraries lead to ours."""

import pytest

from clipline import FixedClip, LocalSGD, Privacy, QuantileClip, SettingError
from clipline.settings import SETTINGS
from clipline.synonyms import SYNONYMS, meant


def test_every_synonym_leads_to_a_setting_and_is_none_itself():
    assert set(SYNONYMS.values()) <= set(SETTINGS)
    assert not set(SYNONYMS) & set(SETTINGS)


@pytest.mark.parametrize(
    ("made", "keywords", "ours"),
    [
        (Privacy, {"eps": 4}, "epsilon"),
        (Privacy, {"n_users": 1000}, "population_size"),
        (Privacy, {"epsilom": 4}, "epsilon"),  # a slip of the finger
        (LocalSGD, {"learning_rate": 0.1}, "lr"),
        (LocalSGD, {"client_lr": 0.1}, "lr"),  # the setting's name on the command line
        (FixedClip, {"max_grad_norm": 1.0}, "clip"),
        (QuantileClip, {"target_quantile": 0.5}, "quantile"),
    ],
)
def test_a_part_answers_an_unknown_keyword_with_its_own_name_for_it(made, keywords, ours):
    ((name, value),) = keywords.items()
    with pytest.raises(SettingError) as error:
        made(**keywords)
    assert str(error.value) == f"{name}={value} is no argument of {made.__name__}: did you mean {ours!r}?"


def test_a_synonym_counts_only_where_its_setting_is_known():
    assert meant("eps", ["epsilon", "delta"]) == "did you mean 'epsilon'?"
    assert meant("eps", ["rounds"]) == "choose among rounds"
