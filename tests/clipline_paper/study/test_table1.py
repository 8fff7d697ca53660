import csv

import pytest

from clipline.errors import RunError
from clipline_paper.study.without_training import PRINTED, figure2_caption, table1, table1_text, write_table1

# task: true epsilon with fixed-size sampling (certified lower bound, upper bound), with Poisson; honest cohorts.
# Computed independently (contour inversion of the moment generating function, and explicit data sets).
TRUTH = {
    "CIFAR-100": (39.00, 41.590, 3.2630, 5067, 1924),
    "EMNIST-CR": (32.51, 32.881, 3.5972, 1009, 461),
    "EMNIST-AE": (36.50, 38.491, 3.2070, 4734, 1884),
    "Shakespeare": (31.20, 31.510, 3.5735, 998, 458),
    "SO-NWP, SO-LR": (9.43, 11.0222, 2.22335, 38468, 7032),
}


def test_table_1_is_met_to_the_last_user_and_corrected(tmp_path):
    seen = []
    rows = table1(seen.append)
    assert seen == [task for task, *_ in PRINTED]
    for row in rows:
        lower, upper, poisson, fixed_cohort, poisson_cohort = TRUTH[row.task]
        assert row.paper_convention_cohort == row.paper_cohort
        assert lower < row.fixed_epsilon < upper + 2e-3
        assert row.poisson_epsilon == pytest.approx(poisson, abs=2e-4)
        assert (row.fixed_cohort, row.poisson_cohort) == (fixed_cohort, poisson_cohort)
    text = table1_text(rows)
    assert "NOT a\nguarantee" in text
    assert max(map(len, text.splitlines())) <= 120
    with write_table1(tmp_path, rows).open() as file:
        assert [int(row["paper_cohort"]) for row in csv.DictReader(file)] == [2231, 513, 2197, 510, 13958]
    with pytest.raises(RunError, match="is in use"):
        write_table1(tmp_path, rows)


def test_the_caption_of_figure_2_in_both_conventions():
    text = figure2_caption()
    values = [float(line.split()[-1]) for line in text.splitlines()[1:]]
    # printed; oracle E062 0.03397855; E063 8.5637e-4; E064 3.6374e-4
    assert values == pytest.approx([0.034, 0.033978, 8.5637e-4, 3.6374e-4], rel=2e-3)
