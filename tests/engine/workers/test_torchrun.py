"""Processes that torchrun starts, on the processor with gloo: real ones, through the command line."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from datetime import timedelta

import pytest
import torch
from safetensors.torch import load_file
from samples import LOCAL, ROOT, cross_entropy, flat_training, linear_model, small_population

from clipline.cli.train import resolve, run
from clipline.engine.workers import torchrun

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
FLAGS = "--population-size 100 --cohort-size 12 --rounds 2 --noise-multiplier 0.5 --engine one-by-one"
TRAIN = ["-m", "clipline", "train", *FLAGS.split()]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def environment(**more):
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


def call(arguments, cwd):
    run = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run


def test_torchrun_trains_one_run_that_one_process_repeats(tmp_path):
    more = "--noise banded --bands 2 --seed 3 --device cpu --out together --json"  # rank 0 keeps the earlier noise
    together = call([*TORCHRUN, *TRAIN, *more.split()], tmp_path)
    (line,) = together.stdout.splitlines()  # rank 0's; the others print nothing
    assert json.loads(line)["run_dir"] == "together"
    assert re.search(r"training 2 rounds on \d+ users by 2 workers for \(epsilon", together.stderr)
    assert together.stderr.count("training 2 rounds") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["together"]
    settings = tomllib.loads((tmp_path / "together" / "settings.toml").read_text())
    assert settings["seed"] == 3
    run(*resolve(None, tmp_path / "together" / "settings.toml", {"workers": 1}), tmp_path / "one", None, True)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "together"))
    for name in one:
        # float32: a parameter may be rounded the other way in round 0, and round 1 trains from there
        assert (one[name] - two[name]).norm() <= 1e-5 * one[name].norm()


def pair(tmp_path, *of_rank):
    """Two ranks of one group, each with arguments of its own; gives their exit codes and standard errors."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = []
    for rank, arguments in enumerate(of_rank):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env = environment(**place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        command = [sys.executable, *arguments]
        pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen(command, cwd=tmp_path, env=env, text=True, **pipes))
    errors = [rank.communicate(f"{ranks[1].pid}\n", timeout=120)[1] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, errors, strict=True)]


def test_ranks_that_were_told_different_things_are_refused(tmp_path):
    for code, text in pair(tmp_path, [*TRAIN, "--quantile", "0.5"], [*TRAIN, "--quantile", "0.6"]):
        assert code == 2
        given = r"(quantile=|--quantile )0\.6"  # as a flag where this rank was given it
        assert re.search(given + " on rank 1 must be rank 0's, 0.5: start every rank with the same command", text)
        assert "Traceback" not in text
    assert list(tmp_path.iterdir()) == []


LIBRARY = """
import os, sys
sys.path[:0] = {path!r}
from samples import LOCAL, cross_entropy, flat_training, linear_model, small_population
import torch
def fails(model, batch):
    if (batch["y"] == 2).any():  # made-up labels are 0 and 1
        raise ZeroDivisionError("boom")
    return cross_entropy(model, batch)
def made(loss, users, change=0.0):
    population = small_population(users)
    population.fields["x"][17, 2] += change
    return flat_training(linear_model(), loss, population, rounds=2, cohort_size=20, local=LOCAL, seed=1,
                         noise_multiplier=0.5, workers="torchrun", engine="one-by-one", on_error="raise")
def go(training):
    if not training.leads:
        return training.serve()
    return training.run()
rank = int(sys.argv[1])
if rank == 1:
    try:
        made(cross_entropy, 60).run()
    except ValueError as error:
        assert "call serve()" in str(error), error
# A loss that fails on rank 1 alone is told to rank 0; rank 1 goes on to the next run.
try:
    go(made(fails if rank == 1 else cross_entropy, 60))
    assert rank == 1
except RuntimeError as error:
    assert rank == 0 and "worker 1 of 2 failed" in str(error) and "in fails" in str(error), error
# The same group serves a second run, equal to that of one process.
result = go(made(cross_entropy, 60))
if rank == 0:
    one = flat_training(linear_model(), cross_entropy, small_population(60), rounds=2, cohort_size=20, local=LOCAL,
                        seed=1, noise_multiplier=0.5).run()
    assert (one.state.params - result.state.params).norm() <= 1e-12 * one.state.params.norm()
# Other data on rank 1, be it a single value: refused on both.
try:
    go(made(cross_entropy, 60, change=1e-9 * rank))
    sys.exit("one value differed")
except ValueError as error:
    assert str(error).startswith("values of the data (salted checksum)="), error
try:
    go(made(cross_entropy, 60 + rank))
except ValueError as error:
    assert "on rank 1 must be rank 0's" in str(error), error
    os._exit(7)  # as the command line leaves: torch's threads may abort a process while Python ends
"""


def test_a_program_may_run_and_serve_by_itself(tmp_path):
    script = LIBRARY.format(path=[str(ROOT / "tests")])
    for code, text in pair(tmp_path, ["-c", script, "0"], ["-c", script, "1"]):
        assert code == 7, text


STOPPED = """
import os, signal, sys, torch
sys.path[:0] = {path!r}
import clipline.engine.workers.transport as transport
from clipline import RunDirectory
from samples import LOCAL, Observer, cross_entropy, flat_training, linear_model, small_population
rank, in_share, transport.SILENCE = int(sys.argv[1]), sys.argv[2] == "share", 0.5
def stop(*args):
    os.kill(os.getpid(), signal.SIGSTOP)
def loss(model, batch):
    if rank and in_share and (batch["y"] == 2).any() and torch.is_grad_enabled():  # made-up labels are 0 and 1
        stop()
    return cross_entropy(model, batch)
if rank and not in_share:
    transport.DistributedTransport.reduce = stop
training = flat_training(linear_model(), loss, small_population(60), rounds=2, cohort_size=20, local=LOCAL, seed=1,
                         noise_multiplier=0.5, workers="torchrun", engine="one-by-one")
try:
    training.run([RunDirectory("run")]) if training.leads else training.serve()
except Exception as error:
    print(error, file=sys.stderr, flush=True)
    os.kill(int(sys.stdin.readline()), signal.SIGKILL)
    os._exit(5)
"""


@pytest.mark.parametrize(("moment", "named"), [("share", "worker 1 of 2"), ("reduce", "a worker of 2")])
def test_a_stopped_rank_is_named_and_the_run_can_be_resumed_without_it(tmp_path, moment, named):
    script = STOPPED.format(path=[str(ROOT / "tests")])
    (code, text), (ended, _) = pair(tmp_path, ["-c", script, "0", moment], ["-c", script, "1", moment])
    assert code == 5
    assert ended == -signal.SIGKILL
    assert f"{named} was silent for" in text

    def made():
        return flat_training(
            linear_model(), cross_entropy, small_population(60), rounds=2, cohort_size=20, local=LOCAL, seed=1,
            noise_multiplier=0.5, engine="one-by-one",
        )  # fmt: skip

    resumed, whole = made().resume(tmp_path / "run"), made().run()
    assert resumed.guarantee == whole.guarantee
    assert torch.equal(resumed.state.params, whole.state.params)


def test_a_group_of_gpus_ends_a_process_that_waits_for_another_too_long(monkeypatch):
    made = {}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setattr(
        "torch.distributed.init_process_group", lambda backend, timeout: made.update({backend: timeout})
    )
    monkeypatch.setattr("torch.distributed.new_group", lambda backend, timeout: made.update({backend: timeout}))
    monkeypatch.setattr("atexit.register", lambda *_: None)
    monkeypatch.setattr(torchrun, "_of_gpus", [])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    torchrun.join_group()
    assert made["nccl"] == timedelta(hours=1)
    assert made["gloo"] > timedelta(days=1)  # the others wait while rank 0 measures


def test_joining_leaves_the_callers_hook_for_errors(monkeypatch):
    def initialised(*args, **kwargs):
        sys.excepthook = print  # as torch does

    monkeypatch.setattr("torch.distributed.init_process_group", initialised)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setattr("atexit.register", lambda *_: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    before = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", before)  # put back if this fails
    torchrun.join_group()
    assert sys.excepthook is before
