import pytest

from clipline.study.tune.recipe import RateGrid, best_point
from clipline.study.tune.trials import Metric

GRID = RateGrid(client_lr=0.1, server_lr=1.0)
UP, DOWN = Metric("accuracy", lower_is_better=False), Metric("error", lower_is_better=True)


def test_the_search_ends_where_the_best_has_beaten_all_its_neighbours():
    scores = {point: 0.5 - 0.1 * (abs(point[0]) + abs(point[1])) for point in GRID.first()}
    assert GRID.next(scores, UP) == []


def test_the_search_moves_over_the_edge_to_where_the_best_is():
    scores = {point: float(point[1]) for point in GRID.first()}  # the larger the server rate the better
    # Of three equals with server rate +1 the one in the middle counts as best.
    assert best_point(scores, UP) == (0, 1)
    assert set(GRID.next(scores, UP)) == {(-1, 2), (0, 2), (1, 2)}
    scores[-1, 1] = 2.0  # the corner
    assert set(GRID.next(scores, UP)) == {(-2, 0), (-2, 1), (-2, 2), (-1, 2), (0, 2)}


@pytest.mark.parametrize(("at_the_edge", "goes_on"), [(0.952, False), (0.97, True)])
def test_the_search_goes_over_the_edge_for_more_than_one_percent_only(at_the_edge, goes_on):
    scores = {**dict.fromkeys(GRID.first(), 0.9), (0, 0): 0.945, (-1, 1): at_the_edge}  # 0.945 / 0.955 = 0.99
    assert best_point(scores, UP) == (-1, 1)
    assert bool(GRID.next(scores, UP)) is goes_on


def test_a_lower_metric_is_better_where_the_task_says_so():
    scores = {(0, 0): 0.2, (0, 1): 0.1, (1, 0): 0.4}
    assert best_point(scores, DOWN) == (0, 1)
    assert best_point(scores, UP) == (1, 0)


@pytest.mark.parametrize("metric", [UP, DOWN])
def test_where_every_run_diverged_the_search_turns_to_smaller_rates(metric):
    scores = dict.fromkeys(GRID.first(), metric.worst)
    further = GRID.next(scores, metric)
    assert set(further) == {(-2, -2), (-2, -1), (-2, 0), (-1, -2), (0, -2)}
