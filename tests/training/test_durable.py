"""Simulated power cuts: what was synced is kept, everything else is gone."""

import errno
import math
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from samples import Gone, GoneAfter, Observer, StopAfter, small_training

from clipline import RunDirectory
from clipline.errors import RunError
from clipline.privacy import Ledger
from clipline.training import durable, run_directory
from clipline.training.callbacks import Callback
from clipline.training.evaluation import Evaluate
from clipline.training.options import Privacy
from clipline.training.run_directory import CHECKPOINT, KEY, LEDGER, METRICS, MODEL, OLDER, SETTINGS

pytestmark = pytest.mark.skipif(os.name == "nt", reason="looks at descriptors through /proc or by inode")


class Disk:
    """What a power cut would leave of the files below a folder: contents as of their last sync, under synced names.

    A file's content reaches the disk when its descriptor is synced, a name when its folder is. A rename that was not
    followed by a sync of the folder leaves the old file. This is the least that POSIX promises.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.contents: dict[int, bytes] = {}  # by inode
        self.names: dict[Path, dict[str, int]] = {}  # of each folder that was synced: name -> inode
        self.order: list[str] = []
        self._sync = os.fsync

    def synced(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        for path in [self.root, *self.root.rglob("*")]:
            if path.exists() and path.stat().st_ino == found.st_ino:
                if path.is_dir():
                    self.names[path] = {one.name: one.stat().st_ino for one in path.iterdir()}
                else:
                    self.contents[found.st_ino] = path.read_bytes()
                self.order.append(path.name)

    @contextmanager
    def watched(self):
        def sync(descriptor: int) -> None:
            self._sync(descriptor)
            self.synced(descriptor)

        with mock.patch.object(os, "fsync", sync), mock.patch.object(os, "fdatasync", sync, create=True):
            yield self

    def on_disk(self, path: Path) -> bytes | None:
        """A file as the cut leaves it: None if it is gone, empty if only its name is there."""
        for folder in [one for one in path.parents if one.is_relative_to(self.root)][:-1]:
            if folder.name not in self.names.get(folder.parent, {}):
                return None
        inode = self.names.get(path.parent, {}).get(path.name)
        return None if inode is None else self.contents.get(inode, b"")

    def cut(self, folder: Path, target: Path) -> None:
        """Copy what is left of a folder."""
        target.mkdir()
        for name in self.names.get(folder, {}):
            content = self.on_disk(folder / name)
            if content is not None:
                (target / name).write_bytes(content)


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    with Disk(tmp_path / "disk").watched() as watched:
        yield watched


def training(noise_source="seed", rounds=6, **changes):
    seed = 3 if noise_source == "seed" else None
    return small_training(rounds, noise_source=noise_source, seed=seed, **changes)


class Cutting(Callback):
    """Cuts the power each time it hears of something: notes how many rounds would still be charged."""

    def __init__(self, disk, folder):
        self.disk, self.folder, self.heard, self.lines = disk, folder, [], []

    def look(self, state):
        (self.folder.parent / "ledger").write_bytes(self.disk.on_disk(self.folder / LEDGER) or b"")
        self.lines.append(Ledger.read(self.folder.parent / "ledger").rounds)
        self.heard.append(state.round_index)

    def on_start(self, training, state):
        assert self.disk.on_disk(self.folder / SETTINGS)  # with the seed, before the first round
        assert self.disk.on_disk(self.folder / METRICS) == b""

    def on_release(self, state):
        self.look(state)

    def on_round(self, report, state):
        self.look(state)


@pytest.mark.parametrize("noise_source", ["seed", "system"])
@pytest.mark.parametrize("rounds", [6, 102])  # one by one; and charged ahead
def test_a_power_cut_forgets_no_round_that_anybody_heard_of(disk, noise_source, rounds):
    folder = disk.root / "runs" / "deep" / "r"
    cutting, measured = Cutting(disk, folder), []
    metric = Evaluate(lambda model: measured.append(disk.on_disk(folder / LEDGER).count(b"\n")) or {"a": 0.5}, every=3)
    training(noise_source, rounds).run([cutting, metric, RunDirectory(folder)])
    assert cutting.heard[-1] == rounds
    assert all(charged >= heard for charged, heard in zip(cutting.lines, cutting.heard, strict=True))
    assert max(c - h for c, h in zip(cutting.lines, cutting.heard, strict=True)) <= 8  # nor many for nothing
    assert all(charged >= 3 * number for number, charged in enumerate(measured, start=1))  # before it is measured
    assert max(cutting.lines) == rounds  # never beyond the plan
    assert Ledger.read(folder / LEDGER).rounds == rounds


@pytest.mark.parametrize("noise_source", ["seed", "system"])
@pytest.mark.parametrize("rounds", [6, 102])
@pytest.mark.parametrize("share", [0.4, 0.9])
def test_what_a_power_cut_leaves_can_be_resumed(disk, tmp_path, noise_source, rounds, share):
    after, folder, left = round(share * rounds), disk.root / "r", tmp_path / "left"
    cut, keys = training(noise_source, rounds), []

    def power_cut(report, state):
        if state.round_index == after:
            disk.cut(folder, left)
            keys.append(cut.key.unprivate_bytes)
            raise Gone

    with pytest.raises(Gone):
        cut.run([RunDirectory(folder, checkpoint_every=2), Observer(power_cut)])
    charged = Ledger.read(left / LEDGER).rounds
    assert after <= charged <= after + 8
    result = training(noise_source, rounds).resume(left)
    whole = training(noise_source, rounds)
    whole.key.restore(keys[0])
    uncut = whole._run([], None, again=True)
    assert torch.equal(result.state.params, uncut.state.params)
    assert result.guarantee == uncut.guarantee
    assert rounds == result.guarantee.rounds == Ledger.read(left / LEDGER).rounds >= charged


def test_the_end_of_a_run_is_on_disk_before_the_checkpoint_goes(disk):
    gone, unlink = [], Path.unlink

    def watched(path, **given):
        if path.name == CHECKPOINT:
            gone.append({name: disk.on_disk(path.parent / name) for name in (MODEL, METRICS, LEDGER)})
        unlink(path, **given)

    with mock.patch.object(Path, "unlink", watched):
        training().run([RunDirectory(disk.root / "r", checkpoint_every=2)])
    (at_the_end,) = gone
    assert at_the_end == {name: (disk.root / "r" / name).read_bytes() for name in at_the_end}
    assert len(at_the_end[METRICS].splitlines()) == 6


def test_an_interrupted_run_has_its_model_and_its_checkpoint_on_disk(disk):
    training().run([RunDirectory(disk.root / "r"), StopAfter(3)])
    for name in (CHECKPOINT, MODEL, METRICS, LEDGER):
        assert disk.on_disk(disk.root / "r" / name) == (disk.root / "r" / name).read_bytes()


def test_a_file_is_synced_before_it_gets_its_name_and_the_folder_after(disk):
    replace = Path.replace

    def renamed(path, target):
        disk.order.append("rename")
        return replace(path, target)

    with mock.patch.object(Path, "replace", renamed):
        durable.write(disk.root / "a", "text")
    assert disk.order == ["a.partial", "rename", "disk"]


# A sync that fails ----------------------------------------------------------------------------------------------------


def failing(name, number=errno.EIO):
    """Syncs of the file (or folder) of this name fail."""
    sync = os.fsync

    def fails(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == name:
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    return mock.patch.multiple(os, fsync=fails, fdatasync=fails)


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads names of descriptors")


@needs_proc
@pytest.mark.parametrize("noise_source", ["seed", "system"])
def test_a_ledger_that_cannot_be_synced_ends_the_run_before_anybody_hears_of_the_round(tmp_path, noise_source):
    heard = []

    class Listener(Callback):
        def on_release(self, state):
            heard.append(state.round_index)

        def on_round(self, report, state):
            heard.append(state.round_index)

    real = durable.append

    def third(path, text):
        if len(path.read_text().splitlines()) == 2:
            with failing(LEDGER):
                real(path, text)
        real(path, text)

    with (
        mock.patch.object(durable, "append", third),
        pytest.raises(RunError, match=r"ledger.jsonl' could not be synced to disk \(Input/output error\).*resume the"),
    ):
        training(noise_source).run([RunDirectory(tmp_path / "r", checkpoint_every=1), Listener()])
    assert max(heard) == 2
    result = training(noise_source).resume(tmp_path / "r")
    assert result.state.round_index == 6
    assert result.guarantee.rounds >= 6


@needs_proc
@pytest.mark.parametrize("name", [f"{SETTINGS}.partial", "r", f"{LEDGER}.partial"])
def test_a_start_that_cannot_be_synced_runs_no_round(tmp_path, name):
    with failing(name, errno.ENOSPC), pytest.raises(RunError, match="could not be synced to disk"):
        training().run([RunDirectory(tmp_path / "r")])
    assert not (tmp_path / "r" / METRICS).exists() or (tmp_path / "r" / METRICS).read_text() == ""


@needs_proc
def test_a_checkpoint_that_cannot_be_synced_ends_the_run_and_leaves_the_last_one(tmp_path):
    with failing(f"{CHECKPOINT}.partial"), pytest.raises(RunError, match="could not be synced to disk"):
        training("system").run([RunDirectory(tmp_path / "r")])
    assert not (tmp_path / "r" / CHECKPOINT).exists()


@needs_proc
def test_a_file_system_that_syncs_no_folders_will_do(tmp_path):
    with failing("r", errno.EINVAL):
        assert training().run([RunDirectory(tmp_path / "r")]).stopped == "finished"


# Records that know more than the ledger -------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise_source", "key"), [("seed", False), ("system", True), ("system", False)])
def test_rounds_that_only_the_metrics_know_are_charged(tmp_path, noise_source, key):
    with pytest.raises(Gone):
        training(noise_source).run([RunDirectory(tmp_path / "r", checkpoint_every=2), GoneAfter(3)])
    (tmp_path / "r" / OLDER).replace(tmp_path / "r" / CHECKPOINT)  # as if there had been none after the first round
    if not key:
        (tmp_path / "r" / KEY).unlink(missing_ok=True)
    (tmp_path / "r" / LEDGER).write_text("")  # as it was cut short; the metrics have rounds 0, 1 and 2
    assert len((tmp_path / "r" / METRICS).read_text().splitlines()) == 3
    result = training(noise_source).resume(tmp_path / "r")
    again = 3 if noise_source == "system" and not key else 0  # released twice, under another key
    assert result.guarantee.rounds == 6 + again
    assert Ledger.read(tmp_path / "r" / LEDGER).rounds == result.guarantee.rounds


def test_lines_of_metrics_that_are_damaged_or_no_round_charge_nothing_and_end_nothing(tmp_path):
    with pytest.raises(Gone):
        training().run([RunDirectory(tmp_path / "r", checkpoint_every=2), GoneAfter(3)])
    with (tmp_path / "r" / METRICS).open("ab") as file:
        file.write(b'{"round": 1e300}\n{"round": 1000000000}\n{"round": -1}\n{"round": 2.5}\n{"round": [1]}\n[]\n')
        file.write(b'{"round": \xff\n not json \n' + b"[" * 100_000 + b"\n")  # too deep for Python
    assert training().resume(tmp_path / "r").guarantee.rounds == 6


# Charged ahead --------------------------------------------------------------------------------------------------------


def charged_ahead(folder, seen):
    """Notes after every round how many of the rounds in the ledger have not come yet."""
    return Observer(lambda _, state: seen.append(Ledger.read(folder / LEDGER).rounds - state.round_index))


def test_rounds_that_were_charged_ahead_and_never_came_are_taken_back_when_a_run_ends_by_an_error(tmp_path):
    seen = []
    with pytest.raises(Gone):
        training(rounds=160).run([RunDirectory(tmp_path / "r"), charged_ahead(tmp_path / "r", seen), GoneAfter(13)])
    assert seen == [7, 6, 5, 4, 3, 2, 1, 0, 7, 6, 5, 4, 3]  # 160 / 20 = 8 with one sync
    assert Ledger.read(tmp_path / "r" / LEDGER).rounds == 13


def test_a_budget_is_never_charged_beyond(tmp_path):
    most = []
    run = training(rounds=400, privacy=Privacy(noise_multiplier=4.0, max_epsilon=3.0))
    look = Observer(lambda report, state: most.append(Ledger.read(tmp_path / "r" / LEDGER)))
    result = run.run([RunDirectory(tmp_path / "r"), look])
    assert result.stopped == "budget"
    assert max(ledger.rounds for ledger in most) == result.state.round_index < 400
    assert all(run.guarantee_of(ledger).epsilon <= 3.0 for ledger in {one.rounds: one for one in most}.values())


def test_a_budget_is_never_charged_beyond_after_resumes_with_noise_from_the_system(tmp_path):
    """Rounds that are run again are charged again, and what is charged ahead of them leaves room for that."""

    def made():
        privacy = Privacy(noise_multiplier=4.0, max_epsilon=2.9, noise_source="system")
        return training("system", 400, privacy=privacy)

    affordable, most = made().affordable(made().init()), []
    folder, left = tmp_path / "r", tmp_path / "left"

    class Killed(Callback):
        """A kill as soon as so many rounds are charged: what it leaves of the folder is kept."""

        def __init__(self, after):
            self.after = after

        def on_release(self, state):
            most.append(Ledger.read(folder / LEDGER).rounds)
            if state.ledger.rounds >= self.after:
                shutil.copytree(folder, left)
                (left / KEY).unlink()  # so that rounds that are run again draw afresh
                raise Gone

    for start in (
        lambda: made().run([RunDirectory(folder), Killed(20)]),
        lambda: made().resume(folder, [Killed(affordable - 12)]),
    ):
        with pytest.raises(Gone):
            start()
        shutil.rmtree(folder)
        left.rename(folder)
    run = made()
    result = run.resume(folder, [Killed(math.inf)])
    assert result.stopped == "budget"
    assert result.state.round_index < max(most) == Ledger.read(folder / LEDGER).rounds == affordable
    assert run.guarantee_of(Ledger.read(folder / LEDGER)).epsilon <= 2.9


def test_a_model_of_many_parameters_is_charged_round_by_round(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "_SHORT", 20 * 18)  # as many users times parameters as here
    seen = []
    training(rounds=100).run([RunDirectory(tmp_path / "r"), charged_ahead(tmp_path / "r", seen)])
    assert set(seen) == {0}
