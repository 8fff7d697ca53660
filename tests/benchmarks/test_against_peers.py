"""The comparison with peers, as far as it goes without installing any."""

import json
import subprocess
import sys

import numpy as np
import pytest
from samples import ROOT

from clipline.tasks import task_named


@pytest.fixture(autouse=True)
def beside_the_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))


@pytest.fixture
def bench():
    import against_peers

    return against_peers


@pytest.fixture
def two(bench):
    ours = bench.Measured("clipline 1, torch 2", (0.5, 0.4, 0.9), 2**29, None)
    return {"clipline": ours, "pfl": bench.Measured("pfl 3", (2.0, 1.0, 4.0), 2**30, 2**20)}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--task", "mnist"], "emnist_cr"),
        (["--peers", "pfl,tff"], "'tff' but must name some of pfl, fedjax, flower"),
        (["--users", "0"], "--users 0 must be at least 1"),
        (["--rounds", "-1"], "--rounds -1 must be at least 1"),
        (["--in-a-row", "0"], "--in-a-row 0 must be at least 1"),
        (["--options", "workers"], "'workers' but must have KEY=VALUE"),
        (["--peer-precision", "tf32", "--device", "cuda"], "choose from"),
        (["--peer-precision", "bf16"], "--peer-precision bf16 needs --device cuda"),
        (
            ["--peer-precision", "bf16", "--device", "cuda"],
            "known of pfl alone but --peers has ['pfl', 'fedjax', 'flower']",
        ),
    ],
)
def test_wrong_flags_are_refused_with_what_is_right(bench, flags, says, capsys):
    with pytest.raises(SystemExit):
        bench.arguments(flags)
    assert says in capsys.readouterr().err


def test_quick_lowers_only_what_was_not_given(bench):
    quick = bench.arguments(["--quick", "--rounds", "9"])
    assert (quick.users, quick.rounds, quick.peers) == (5, 9, ["pfl", "fedjax", "flower"])
    assert bench.arguments(["--peers", "none"]).peers == []


def test_the_json_line_maps_systems_to_their_medians(bench, two):
    got = json.loads(bench.as_json(two, users=10, task="so_lr"))
    assert got["clipline"]["seconds_per_round"] == 0.5
    assert got["clipline"]["peak_memory_bytes"] == 2**29
    assert got["pfl"]["milliseconds_per_user"] == 200
    assert got["pfl"]["examples"] == 10 * 200


def test_the_table_compares_with_clipline_and_names_who_is_left_out(bench, two):
    text = bench.table(two, {"flower": "cannot be installed: no network"}, users=10)
    assert "| pfl 3 | 2.000 (1.000 to 4.000) | 200.0 | 4.00 | 1024 | 1 | adaptive clip, noise |" in text
    assert text.endswith("\n\nLeft out: flower, which cannot be installed: no network.")


def test_a_recorded_line_has_the_ratio_and_where_it_was_measured(bench, two):
    wanted = bench.arguments(["--task", "so_lr", "--commit", "abc1234"])
    ours, pfl = bench.as_records(two, wanted, "python x")
    assert (ours["system"], ours["seconds"], ours["times_ours"]) == ("clipline", 0.5, 1)
    assert (pfl["seconds"], pfl["times_ours"], pfl["commit"], pfl["task"]) == (2, 4, "abc1234", "so_lr")


def test_the_precision_of_both_sides_is_asked_for_and_recorded(bench, two, monkeypatch):
    started = []
    monkeypatch.setattr(bench, "System", lambda name, python, flags, *rest: started.append((name, flags)))
    monkeypatch.setattr(bench, "python_of", lambda name, here: "python")
    equal = ["--task", "so_lr", "--device", "cuda", "--peers", "pfl", "--options", "precision=bf16"]
    wanted = bench.arguments([*equal, "--peer-precision", "bf16", "--commit", "abc1234"])
    for name in ("clipline", "pfl"):
        bench.start(name, wanted)
    (_, ours), (_, pfl) = started
    assert ours[-2:] == ["--options", "precision=bf16"]
    assert pfl[-2:] == ["--precision", "bf16"]
    assert [line["precision"] for line in bench.as_records(two, wanted, "python x")] == ["bf16", "bf16"]
    assert bench.title(wanted) == "Against peers: so_lr on cuda, both in bf16"
    mixed = bench.arguments([*equal, "--commit", "abc1234"])
    assert [line["precision"] for line in bench.as_records(two, mixed, "python x")] == ["bf16", "float32"]
    assert bench.title(mixed) == "Against peers: so_lr on cuda"
    assert bench.title(bench.arguments(["--task", "so_lr"])) == "Against peers: so_lr on cpu"


def test_a_peers_process_knows_the_precision(monkeypatch):
    import protocol

    given = ["pfl_round.py", "--task", "so_lr", "--users", "2", "--rounds", "1"]
    for more, precision in (([], "float32"), (["--precision", "bf16"], "bf16")):
        monkeypatch.setattr(sys, "argv", [*given, *more])
        assert protocol.arguments().precision == precision


def test_an_environment_has_the_device_and_the_packages_of_its_system_alone(bench, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert bench.environment_of("clipline", "cpu", here=False)["PYTHONPATH"].split(":") == [str(ROOT / "src"), "/mine"]
    assert "PYTHONPATH" not in bench.environment_of("pfl", "cpu", here=False)
    carried = bench.environment_of("pfl", "cpu", here=True)["PYTHONPATH"].split(":")
    assert carried == [str(ROOT / "benchmarks" / ".carry"), "/mine"]
    assert bench.environment_of("pfl", "cpu", here=False)["CUDA_VISIBLE_DEVICES"] == ""


def test_a_system_that_does_not_run_is_named_with_its_last_words(bench):
    wanted = bench.arguments(["--quick", "--here", "--peers", "none", "--options", "nonsense=1"])
    measured, missing = bench.measure(wanted)
    assert measured == {}
    assert "stopped with code 1: clipline.errors.SettingError: nonsense=1 is no argument" in missing["clipline"]
    assert "nonsense" in missing["clipline"]


def test_a_task_that_a_peer_has_not_is_refused_before_anything_is_installed(bench):
    with pytest.raises(bench.UnavailableError, match="cannot do cifar100"):
        bench.start("fedjax", bench.arguments(["--task", "cifar100"]))


def test_options_become_keyword_arguments():
    from clipline_round import options_of

    assert options_of(["workers=2", "precision=bf16", "clamp=True"]) == {
        "workers": 2,
        "precision": "bf16",
        "clamp": True,
    }


@pytest.mark.parametrize("task", ["emnist_cr", "emnist_ae", "cifar100", "shakespeare", "so_nwp", "so_lr"])
def test_made_up_users_have_the_fields_of_the_task(task):
    """Peers get the same users as dense arrays: as many examples, and for posts the same words and tags."""
    from workload import WORKLOADS, dense_arrays, user_fields

    from clipline import Population
    from clipline_paper.paper_task import check_fields

    fields = user_fields(task, 3)
    count = WORKLOADS[task].examples
    module = __import__(f"clipline_paper.tasks.{task}", fromlist=["FIELDS"])
    check_fields(Population(np.array([0, count]), fields), module.FIELDS)
    x, y = dense_arrays(task, fields)
    assert len(x) == len(y) == count
    assert all((user_fields(task, 3)[name] == field).all() for name, field in fields.items())
    assert WORKLOADS[task].batch_size == task_named(task).settings.batch_size
    if task == "so_lr":
        np.testing.assert_allclose(x.sum(axis=1), 1, rtol=1e-5)
        assert (y.sum(axis=1) == (fields["tags"] >= 0).sum(axis=1)).all()


def test_plain_networks_have_the_parameters_of_the_paper():
    """But for the second bias of each `nn.LSTM` layer, four gates wide."""
    from torch_models import MODELS
    from workload import WORKLOADS

    second_biases = {"shakespeare": 2 * 4 * 256, "so_nwp": 4 * 670}
    for task, make in MODELS.items():
        count = sum(parameter.numel() for parameter in make().parameters())
        assert count == WORKLOADS[task].parameters + second_biases.get(task, 0), task


def test_a_round_of_clipline_is_served_and_measured():
    """The protocol on the system that is always here: a line in, a line of JSON out, memory at the end."""
    command = [sys.executable, str(ROOT / "benchmarks" / "against_peers.py"), "--task", "so_lr", "--users", "2"]
    flags = ["--rounds", "1", "--in-a-row", "2", "--warmups", "1", "--peers", "none", "--json"]
    out = subprocess.run([*command, *flags], capture_output=True, text=True, check=True).stdout
    got = json.loads(out.splitlines()[-1])
    assert list(got) == ["clipline"]
    assert got["clipline"]["seconds_per_round"] > 0
    assert got["clipline"]["peak_memory_bytes"] > 10**8


def test_ending_the_program_ends_it_at_once_with_all_that_it_started():
    command = [sys.executable, str(ROOT / "benchmarks" / "against_peers.py"), "--task", "so_lr", "--peers", "none"]
    program = subprocess.Popen(
        [*command, "--rounds", "1000", "--users", "2"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert program.stderr is not None
    assert program.stderr.readline()  # the rounds to warm up are over
    program.terminate()
    assert program.wait(timeout=20) == 143
    program.stderr.close()
