import errno
import gc
import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clipline.errors import RunError
from clipline.training import durable
from clipline.training.durable import DirectoryLock, UnlockedWarning

pytestmark = pytest.mark.skipif(durable.fcntl is None, reason="needs fcntl")
TAKEN = "must be free, and another process is at work there: wait until it has ended, or stop it"


def descriptors():
    own = Path("/proc/self/fd")
    return len(list(own.iterdir())) if own.exists() else 0


def test_a_folder_is_locked_once_at_a_time_and_holds_no_file(tmp_path):
    before = descriptors()
    with DirectoryLock(tmp_path):
        with pytest.raises(RunError, match=TAKEN):
            DirectoryLock(tmp_path)
        assert list(tmp_path.iterdir()) == []
        assert descriptors() <= before + 1
    lock = DirectoryLock(tmp_path)
    lock.close()
    lock.close()  # twice is once
    assert descriptors() == before


def test_a_lock_that_nobody_has_any_more_is_let_go(tmp_path):
    gc.collect()  # what other tests left
    before = descriptors()
    lock = DirectoryLock(tmp_path)
    del lock
    gc.collect()
    assert descriptors() == before
    DirectoryLock(tmp_path).close()


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_what_is_no_folder_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=f"{name}' does not exist or is no folder: give another"):
        DirectoryLock(tmp_path / name)


HOLDER = """
import sys, time
from pathlib import Path
from clipline.training.durable import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(120)
"""


def test_the_lock_of_another_process_ends_with_it_however_it_ends(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(RunError, match=TAKEN):
                DirectoryLock(tmp_path)
            second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
            assert "RunError" in second.stderr
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
    DirectoryLock(tmp_path).close()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_forked_copy_neither_keeps_nor_frees_the_lock(tmp_path):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    lock = DirectoryLock(tmp_path)
    child = context.Process(target=lambda: there.send("alive") or there.recv(), daemon=True)
    child.start()
    try:
        assert here.recv() == "alive"
        with pytest.raises(RunError, match=TAKEN):  # the copy has closed its share, and the lock is still there
            DirectoryLock(tmp_path)
        lock.close()
        DirectoryLock(tmp_path).close()  # while the copy is still alive
        assert child.is_alive()
    finally:
        here.send("end")
        child.join()


def test_where_there_are_no_locks_a_warning_says_so(tmp_path, monkeypatch):
    def refuses(descriptor, operation):
        raise OSError(errno.EBADF, "Bad file descriptor")  # as NFS does for folders

    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(durable.fcntl, "flock", refuses)
        with pytest.warns(UnlockedWarning, match="cannot be locked .*Bad file descriptor.*: start no second process"):
            DirectoryLock(tmp_path).close()
    monkeypatch.setattr(durable, "fcntl", None)
    with pytest.warns(UnlockedWarning, match="the system has no such locks"):
        DirectoryLock(tmp_path).close()
    assert descriptors() == before
