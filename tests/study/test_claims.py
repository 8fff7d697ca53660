import os
import signal
import subprocess
import sys

import pytest
from study_task import wait_for

from clipline.study.directory import Claims, claimed_elsewhere


def test_one_at_a_time_has_a_run(tmp_path):
    with Claims(tmp_path) as first, Claims(tmp_path) as second:
        assert first.take("a")
        assert first.take("a")  # it has it already
        assert not second.take("a")
        assert second.take("b")
        assert claimed_elsewhere(tmp_path) == {"a", "b"}
        first.release()
        assert second.take("a")
    assert claimed_elsewhere(tmp_path) == set()


FORK = """
import multiprocessing, sys, time
from pathlib import Path
from clipline.study.directory import Claims
claims = Claims(Path(sys.argv[1]))
assert claims.take("a")
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=False)
worker.start()
print(worker.pid, flush=True)
worker.join()
"""


def test_a_killed_process_holds_no_claim_though_its_workers_outlive_it(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", FORK, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    try:
        claims = Claims(tmp_path)
        assert not claims.take("a")
        assert claimed_elsewhere(tmp_path) == {"a"}
        process.kill()
        process.wait()
        os.kill(worker, 0)  # it is still there
        wait_for(lambda: claims.take("a"), seconds=20)  # as soon as the worker has begun
        claims.release()
    finally:
        os.kill(worker, signal.SIGKILL)
        process.stdout.close()


def test_a_system_without_locks_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("clipline.study.directory.fcntl", None)
    with pytest.warns(UserWarning, match=r"cannot be claimed here \(.*\): start no second process"):
        assert Claims(tmp_path).take("a")
