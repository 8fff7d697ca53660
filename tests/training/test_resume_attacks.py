"""Rounds that are run again by a key release the same numbers only if the code is the same: other code is noticed."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from samples import Gone, GoneAfter, Observer, small_population, small_training

from clipline import Callback, PrivateStatistics, RunDirectory, SettingError
from clipline.federated import ClipState
from clipline.privacy.ledger import Ledger
from clipline.training.checkpoint import code_fingerprint
from clipline.training.run_files import KEY, LEDGER

SOURCE = """
import functools, math, torch
SCALE = 2.0
NAMES = {"a", "b", "c"}
def helper(x):
    return x * SCALE + math.pi
class Base:
    def size(self): return 3
class Rule(Base):
    factor = 0.9
    def update(self, x): return helper(x) * (lambda y: y + 1)(x) if x in {"p", "q", "r"} else x
    @property
    def what(self): return 1
def made(extra):
    def loss(model, batch, weight=1.5): return torch.relu(helper(batch)) + extra
    return loss
rule = Rule()
rule.scale = 1.0
thing = [rule, made(4.0), functools.partial(helper, x=1)]
"""
CHANGES = [
    ("SCALE = 2.0", "SCALE = 2.5"), ("math.pi", "math.e"), ("return 3", "return 4"), ("factor = 0.9", "factor = 0.8"),
    ("y + 1", "y + 2"), ("return 1", "return 7"), ("weight=1.5", "weight=1"), ("made(4.0)", "made(4.5)"),
    ("torch.relu", "torch.tanh"), ('"q"', '"s"'), ("x * SCALE", "x / SCALE"),
    ("rule.scale = 1.0", "rule.scale = 3.0"), ("x=1)", "x=2)"),
]  # fmt: skip


def fingerprint(source):
    space = {"__name__": "__main__"}
    exec(source, space)
    return code_fingerprint(*space["thing"])


def test_the_same_code_has_the_same_fingerprint_in_every_process():
    code = f"from clipline.training.checkpoint import code_fingerprint\n{SOURCE}\nprint(code_fingerprint(*thing))"
    found = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
        for seed in ("1", "2")
    ]
    assert found[0].stdout == found[1].stdout != b""
    assert fingerprint(SOURCE) == fingerprint("# a comment\n" + SOURCE)  # lines do not count


@pytest.mark.parametrize("change", CHANGES, ids=[new for _, new in CHANGES])
def test_other_code_has_another_fingerprint(change):
    assert change[0] in SOURCE
    assert fingerprint(SOURCE.replace(*change)) != fingerprint(SOURCE)


def rule(growth):
    """A clip rule whose code has the number in it, as somebody may change it."""
    space = {"ClipState": ClipState, "dataclass": dataclass, "__name__": "__main__"}
    exec(textwrap.dedent(f"""
        @dataclass(frozen=True)
        class Growing:
            needs_fraction = False
            def init(self): return ClipState(0.5)
            def update(self, state, release): return ClipState(state.clip * {growth}, state.round_index + 1)
    """), space)  # fmt: skip
    return space["Growing"]()


def trained(**changes):
    """Eight rounds with noise from the system."""
    return small_training(8, noise_multiplier=1.0, noise_source="system", **{"seed": None, **changes})


@pytest.mark.parametrize("growth", [1.1, 1.2])
def test_a_run_that_goes_on_with_other_code_takes_another_key_and_charges_its_rounds_anew(tmp_path, growth):
    left, keys = tmp_path / "left", []
    folder = RunDirectory(tmp_path / "r", checkpoint_every=2)
    kept = Observer(lambda _, state: state.round_index == 6 and shutil.copytree(tmp_path / "r", left))
    with pytest.raises(Gone):
        trained(clip=rule(1.1)).run([folder, kept, GoneAfter(6)])
    for name in ("checkpoint.safetensors", "checkpoint.older.safetensors"):
        assert (left / name).exists()
    key = (left / KEY).read_text()

    class Look(Callback):
        def on_start(self, training, state):
            keys.append((state.round_index, (left / KEY).read_text()))

    result = trained(clip=rule(growth)).resume(left, [Look()])
    ((begun, after),) = keys
    assert (after == key) == (growth == 1.1)
    assert torch.isfinite(result.state.params).all()
    assert Ledger.read(left / LEDGER).rounds == result.guarantee.rounds
    assert result.guarantee.rounds == (8 if growth == 1.1 else 8 + 6 - begun)


# Attacks that once worked: what a resume took over, or let pass.


def killed(folder, **changes):
    """The parameters after each of six rounds, after which the run was killed."""
    seen, directory = [], RunDirectory(folder, checkpoint_every=4)
    look = Observer(lambda _, state: seen.append(state.params.clone()))
    with pytest.raises(Gone):
        trained(**changes).run([directory, look, GoneAfter(6)])
    return seen


def test_another_seed_draws_the_same_from_the_key(tmp_path):
    before = killed(tmp_path / "r", seed=7)
    after = []
    look = Observer(lambda _, state: after.append((state.round_index, state.params)))
    result = trained(seed=8).resume(tmp_path / "r", [look])
    again = [(done, params) for done, params in after if done <= 6]
    assert all(torch.equal(before[done - 1], params) for done, params in again)
    assert result.guarantee.rounds == 8


def test_two_run_directories_of_one_run_are_refused_as_both_have_its_key(tmp_path):
    with pytest.raises(SettingError, match="two run directories"):
        trained().run([RunDirectory(tmp_path / "a"), RunDirectory(tmp_path / "b")])


def test_a_statistic_that_a_resume_adds_has_its_line_in_the_ledger(tmp_path):
    killed(tmp_path / "r")
    charged = [PrivateStatistics(seed=5).ranges(small_population(), {"x": (-5.0, 5.0)}, noise_multiplier=3.0)]
    result = trained(preprocessing=charged).resume(tmp_path / "r")
    ledger = Ledger.read(tmp_path / "r" / LEDGER)
    assert (ledger.releases, ledger.rounds) == (9, 8)
    assert Counter(list(result.state.ledger)) == Counter(list(ledger))  # the same charges, in their own order


def test_after_a_resume_that_was_refused_a_new_run_has_another_key(tmp_path):
    """From another state the same noise would hide nothing: the difference of the two runs has none."""
    made, keys = small_training(4, noise_source="system", seed=None), []
    with pytest.raises(Gone):
        made.run([RunDirectory(tmp_path), GoneAfter(2)])
    stored = bytes.fromhex((tmp_path / KEY).read_text().split()[0])
    with pytest.raises(SettingError, match=r"callbacks\[1\]='none' must be a Callback"):
        made.resume(tmp_path, ["none"])
    assert made.key.unprivate_bytes == stored  # it had been taken by then
    made.run([Observer(lambda report, state: keys.append(made.key.unprivate_bytes))])
    assert len({*keys, stored}) == 2
