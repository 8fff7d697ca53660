import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from samples import ROOT
from study_task import seeds, tiny_task

from clipline.errors import SettingError
from clipline.study.directory import StudyDirectory
from clipline.study.study import Study


def test_a_node_that_dies_costs_a_retry_and_no_run(tmp_path):
    pytest.importorskip("ray", reason="needs the extra `cluster`: pip install 'clipline[cluster]'")
    script, folder = Path(__file__).with_name("cluster_of_two.py"), tmp_path / "study"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    out = subprocess.run(
        [sys.executable, str(script), str(folder)],
        capture_output=True, text=True, timeout=180, check=False, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr[-2000:]
    answer = json.loads(out.stdout.splitlines()[-1])
    directory = StudyDirectory(folder)
    assert len(set(answer["ids"])) == 6
    assert answer["ids"] == [Study(folder, tiny_task()).planned(spec).id for spec in seeds(6)]
    assert directory.ids() == sorted(answer["ids"])
    assert len(answer["in_flight"]) >= 1  # the node had something to lose
    assert directory.check() == []
    assert directory.failures() == {}
    here = Study(tmp_path / "here", tiny_task()).results(seeds(2))
    for record in here:  # what a node makes is what this process makes
        assert directory.record(record.id).rounds["clip"] == pytest.approx(record.rounds["clip"])


def test_without_ray_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match=r"pip install 'clipline\[cluster\]'"):
        Study(tmp_path, tiny_task(), cluster="auto")
