import matplotlib.figure
import matplotlib.image
import pytest
from samples import StopAfter, small_training

from clipline import FixedClip, QuantileClip
from clipline.training import curves
from clipline.training.curves import Curves
from clipline.training.evaluation import Evaluate
from clipline.training.run_directory import CURVES, RunDirectory


def training(clip=None, noise_multiplier=0.5, rounds=12, **options):
    return small_training(rounds, clip, noise_multiplier, **options)


def evaluate():
    return Evaluate(lambda model: {"accuracy": 0.25, "loss": float("nan")}, every=3)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were written."""
    figures = []

    def save(figure, path):
        figures.append(figure)
        matplotlib.figure.Figure.savefig(figure, path)

    monkeypatch.setattr(curves, "save_figure", save)
    return figures


def titles(figure):
    return [axis.get_title() for axis in figure.axes]


def test_the_figure_has_metric_clip_epsilon_and_fraction_over_the_rounds(tmp_path, drawn):
    result = training(QuantileClip(0.7), seed=2**61).run([evaluate(), Curves(tmp_path / "c.png", title="rides")])
    (figure,) = drawn
    assert titles(figure)[0] == "accuracy"
    assert titles(figure)[3] == "noisy fraction within the clip (dashed: target 0.7)"
    metric, clip, epsilon, within = (axis.get_lines()[0].get_xydata().tolist() for axis in figure.axes)
    assert metric == [[3, 0.25], [6, 0.25], [9, 0.25], [12, 0.25]]
    assert clip == [[r.round_index + 1, r.clip] for r in result.reports]
    assert epsilon == [[r.round_index + 1, r.guarantee.epsilon] for r in result.reports]
    assert within == [[r.round_index + 1, r.fraction_within] for r in result.reports]
    assert figure.get_suptitle().replace("\n", " ") == f"rides {result.guarantee}"
    labels = [text.get_text() for text in figure.axes[1].get_yticklabels(which="both") if text.get_text()]
    assert len(labels) > 1
    assert all(float(label) > 0 for label in labels)  # plain numbers
    assert matplotlib.image.imread(tmp_path / "c.png").shape[2] == 4


@pytest.mark.parametrize(
    ("options", "facts", "why"),
    [
        ({"seed": 7}, {}, "the seed of its noise is easily guessed"),
        ({"on_error": "raise"}, {}, "errors of users are shown"),
        ({}, {"measured_on": "other examples of the training users, say"}, "metrics are of the training users"),
    ],
)
def test_an_epsilon_that_does_not_hold_is_struck_through_with_the_reason(
    real_curves, tmp_path, drawn, options, facts, why
):
    run = training(**{"seed": 2**61, **options})
    result = run.run([RunDirectory(tmp_path / "r", facts=facts)])
    title = drawn[0].get_suptitle()
    assert "NOT PRIVATE: " in title
    assert why in title
    assert result.guarantee.epsilon_text not in title  # a stroke follows each letter
    assert result.guarantee.epsilon_text in title.replace("\u0336", "")
    assert why in drawn[0].axes[2].texts[0].get_text()
    assert drawn[0].axes[2].get_lines() == []


def test_noise_from_the_system_holds_whatever_the_seed(tmp_path, drawn):
    training(noise_source="system").run([Curves(tmp_path / "c.png")])
    assert "NOT PRIVATE" not in drawn[0].get_suptitle()


def test_what_was_not_measured_released_or_promised_is_said(tmp_path, drawn):
    training(FixedClip(float("inf")), noise_multiplier=0.0).run([Curves(tmp_path / "c.png")])
    words = [[text.get_text() for text in axis.texts] for axis in drawn[0].axes]
    assert words[0] == ["not measured"]
    assert words[1] == ["no clip"]
    assert "NOT PRIVATE" in words[2][0]
    assert "not released" in words[3][0]


def test_the_metric_to_draw_can_be_named_and_a_long_title_fits_above_the_figure(tmp_path, drawn):
    training().run([evaluate(), Curves(tmp_path / "c.png", metric="loss", title=" ".join(["rides of a town"] * 20))])
    figure = drawn[0]
    assert titles(figure)[0] == "loss"  # whose values are no numbers
    (title,) = [text for text in figure.texts if "NOT PRIVATE" in text.get_text()]
    assert title.get_text().startswith("rides of a town")
    box = title.get_window_extent(figure.canvas.get_renderer())
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1


def test_the_figure_of_a_run_directory_has_all_rounds_and_the_facts(real_curves, tmp_path, drawn):
    facts = {"task": "rides", "data": "drawn", "measured_on": "other riders, of another town"}
    run = training(seed=2**61)
    result = run.run([RunDirectory(tmp_path / "r", facts=facts), evaluate()])
    assert titles(drawn[0])[0] == "accuracy on other riders"
    named = f"run {tmp_path.name}/r"
    assert drawn[0].get_suptitle().replace("\n", " ") == f"task rides, data drawn, {named} {result.guarantee}"
    assert len(drawn[0].axes[1].get_lines()[0].get_xdata()) == 12
    assert (tmp_path / "r" / CURVES).exists()


def test_a_folder_may_have_any_name(real_curves, tmp_path):
    folder = tmp_path / "run $x^$ \udcff 走"  # no formula, a byte that is no UTF-8, a letter that no font has
    training().run([RunDirectory(folder), evaluate()])
    assert (folder / CURVES).stat().st_size > 10_000


def test_a_run_without_a_round_draws_nothing(tmp_path):
    training().run([Curves(tmp_path / "c.png"), StopAfter(0)])
    assert list(tmp_path.iterdir()) == []
