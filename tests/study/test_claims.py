import errno
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
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_without_a_process_means_nothing(tmp_path):
    (tmp_path / "a.lock").touch()
    assert claimed_elsewhere(tmp_path) == set()
    assert Claims(tmp_path).take("a")


def test_claims_in_a_folder_that_may_only_be_read_are_seen(tmp_path, monkeypatch):
    """As those of a colleague. Root, who may run the tests, is stopped by no permission: so `open` is."""
    opened = os.open

    def read_only(path, flags, *mode):
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, flags, *mode)

    (tmp_path / "b.lock").touch()
    with Claims(tmp_path) as claims:
        assert claims.take("a")
        with monkeypatch.context() as stopped:
            stopped.setattr(os, "open", read_only)
            assert claimed_elsewhere(tmp_path) == {"a"}


HOLD = """
import signal, sys
from pathlib import Path
from clipline.study.directory import Claims
claims = Claims(Path(sys.argv[1]))
assert claims.take("a")
print("ready", flush=True)
signal.pause()
"""


def test_a_killed_process_holds_no_claim(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    claims = Claims(tmp_path)
    assert not claims.take("a")
    assert claimed_elsewhere(tmp_path) == {"a"}
    process.kill()
    process.communicate()
    assert claims.take("a")
    claims.release()


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


def test_workers_that_outlive_a_killed_process_hold_no_claim(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", FORK, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    try:
        claims = Claims(tmp_path)
        assert not claims.take("a")
        process.kill()
        process.wait()
        os.kill(worker, 0)  # it is still there
        wait_for(lambda: claims.take("a"), seconds=20)  # as soon as the worker has begun
        claims.release()
    finally:
        os.kill(worker, signal.SIGKILL)
        process.stdout.close()


def test_a_lock_on_a_deleted_file_is_no_claim(tmp_path, monkeypatch):
    """Between opening and locking, the holder may delete the file and let go: the lock is then on nothing."""
    import fcntl

    first, second, third = Claims(tmp_path), Claims(tmp_path), Claims(tmp_path)
    assert first.take("a")
    real, called = fcntl.flock, []

    def flock(descriptor, how):
        if not called:
            called.append(True)
            first.release()  # deletes the file that `second` has opened
            assert third.take("a")  # and this is a new one of the same name
        real(descriptor, how)

    monkeypatch.setattr("clipline.study.directory.fcntl.flock", flock)
    assert not second.take("a")
    monkeypatch.undo()
    assert third.ids == ["a"]
    third.release()


def test_a_system_without_locks_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("clipline.study.directory.fcntl", None)
    with pytest.warns(
        UserWarning, match=r"cannot be claimed \(the system has no such locks\): start no second process"
    ):
        assert Claims(tmp_path).take("a")
