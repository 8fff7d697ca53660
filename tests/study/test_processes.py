"""Several real processes on one study directory, some of them killed."""

import os
import signal
from collections import Counter

from study_task import process_of, seeds, tiny_task, wait_for, work

from clipline.study.directory import StudyDirectory
from clipline.study.study import Study

RUNS, PATIENCE = 14, 60.0


def lines(log):
    return [line.split() for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []


def test_no_run_is_made_twice_and_none_is_lost_whoever_is_killed(tmp_path):
    """Three processes; two are killed with runs in their hands, one of them stopped first; one more joins."""
    folder, log = tmp_path / "study", tmp_path / "log"
    killed = []

    def started(side_by_side):
        return process_of(work, str(folder), RUNS, str(log), side_by_side, "0.03")

    def added():
        return [run for word, run, _ in lines(log) if word == "add"]

    def in_hand(process):
        own = [(word, run) for word, run, pid in lines(log) if int(pid) == process.pid]
        return {run for word, run in own if word == "begin"} - {run for word, run in own if word == "add"}

    processes = [started(2), started(1), started(2)]
    for victim in processes[:2]:
        wait_for(lambda victim=victim: in_hand(victim))
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(10)
        killed.append(victim.pid)
        before = len(added())
        wait_for(lambda before=before: len(added()) > before)
    processes.append(started(1))
    for process in processes[2:]:
        process.join(PATIENCE)
        assert process.exitcode == 0
    wanted = {Study(folder, tiny_task()).planned(spec).id for spec in seeds(RUNS)}
    directory = StudyDirectory(folder)
    assert set(directory.ids()) == wanted  # none is lost
    assert directory.check() == []
    assert directory.claimed() == set()
    assert set(Counter(added()).values()) == {1}  # none was written twice
    begun = Counter(run for word, run, pid in lines(log) if word == "begin" and int(pid) not in killed)
    finished_by_killed = {run for word, run, pid in lines(log) if word == "add" and int(pid) in killed}
    assert set(begun.values()) == {1}  # none was made twice by those who lived
    assert not set(begun) & finished_by_killed  # nor again after one who died had finished it
