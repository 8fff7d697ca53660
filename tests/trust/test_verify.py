"""Edits of a run directory, one file at a time and all alike, and what finds each."""

import json
import os
import re
import shutil
import subprocess

import pytest
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import save_file
from samples import StopAfter, small_training

import clipline as cl
from clipline.cli.parser import app
from clipline.errors import RunError, SettingError
from clipline.study.report.reading import read_run_directory
from clipline.tasks.train_settings import read_toml
from clipline.training.durable import save_tensors
from clipline.trust.card import write_cards
from clipline.trust.verify import check_signature, seal, sign_run, verify


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def edit(pattern, text, file, count=1):
    def made(path):
        before = (path / file).read_text()
        after = re.sub(pattern, text, before, count=count, flags=re.MULTILINE)
        assert after != before
        (path / file).write_text(after)

    return made


def edit_card(change):
    def made(path):
        with safe_open(path / "model.safetensors", "pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        card = json.loads(metadata["card"])
        metadata["card"] = json.dumps(change(card) or card)
        save_tensors(tensors, path / "model.safetensors", metadata)

    return made


def flip(file, where):
    def made(path):
        data = bytearray((path / file).read_bytes())
        data[where if isinstance(where, int) else data.index(where)] ^= 1
        (path / file).write_bytes(data)

    return made


def cut_metadata(path):
    with safe_open(path / "model.safetensors", "pt") as file:
        save_file({name: file.get_tensor(name) for name in file.keys()}, path / "model.safetensors")  # noqa: SIM118


def drop_last(*files):
    def made(path):
        for file in files:
            (path / file).write_text("".join((path / file).read_text().splitlines(keepends=True)[:-1]))

    return made


def double_last(file):
    def made(path):
        lines = (path / file).read_text().splitlines(keepends=True)
        (path / file).write_text("".join([*lines, lines[-1]]))

    return made


def charge_more(path):
    with (path / "ledger.jsonl").open("a") as file:
        first = json.loads((path / "ledger.jsonl").read_text().splitlines()[0])
        file.write(json.dumps({**first, "round": 12}) + "\n")


def drop_epsilon(path):
    lines = (path / "metrics.jsonl").read_text().splitlines()
    last = {**json.loads(lines[-1]), "epsilon": 1.0}
    (path / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")


Z = r"^# noise_multiplier = .*"
EDITS = {
    "no settings": (lambda path: (path / "settings.toml").unlink(), "settings.toml is missing"),
    "no ledger": (lambda path: (path / "ledger.jsonl").unlink(), "ledger.jsonl is missing"),
    "no metrics": (lambda path: (path / "metrics.jsonl").unlink(), "metrics.jsonl is missing"),
    "no model": (lambda path: (path / "model.safetensors").unlink(), "model.safetensors is missing"),
    "a model that is no model": (lambda path: (path / "model.safetensors").write_bytes(b"x" * 99), "has no card"),
    "another value in the model": (flip("model.safetensors", -1), "model.safetensors is damaged"),
    "another letter in the model's metadata": (flip("model.safetensors", b"epsilon"), "model.safetensors is damaged"),
    "a key that was left": (lambda path: (path / "resume.key").write_text("00"), "resume.key is still there"),
    "a model without a card": (cut_metadata, "has no card"),
    "a lower epsilon in the card": (
        edit_card(lambda card: card["guarantee"].update(epsilon=1.0)), "epsilon is 1.0 in the model's card"),
    "other words in the card": (edit_card(lambda card: card["guarantee"].update(text="fine")), "says 'fine'"),
    "another relation in the card": (edit_card(lambda card: card["guarantee"].update(relation="zero-out")), "relation"),
    "a lower delta in the card": (edit_card(lambda card: card["guarantee"].update(delta=1e-9)), "delta is 1e-09"),
    "fewer rounds in the card": (edit_card(lambda card: card.update(rounds=11)), "card has 11 rounds"),
    "fewer rounds in the guarantee": (edit_card(lambda card: card["guarantee"].update(rounds=11)), "rounds is 11"),
    "a secret seed in the card": (edit_card(lambda card: card["guarantee"].update(from_seed=False)), "from_seed"),
    "more noise in the card": (edit_card(lambda card: card["resolved"].update(noise_multiplier=9.0)), "Theorem 1"),
    "another cohort in the card": (edit_card(lambda card: card["settings"].update(cohort_size=6)), "cohort_size is 6"),
    "no guarantee in the card": (edit_card(lambda card: card.pop("guarantee")), "has no card"),
    "more noise in the ledger": (edit('"noise_multiplier": ', '"noise_multiplier": 1', "ledger.jsonl", 0), "charges"),
    "a lower rate in the ledger": (edit('"rate": 0.2', '"rate": 0.1', "ledger.jsonl", 0), "charges Poisson sampling"),
    "a sampling that no training has": (
        edit('"poisson", "rate": 0.2', '"grouped-poisson", "rate": 0.0001, "bands": 1, "index": 0',
             "ledger.jsonl", 0), "charges Poisson sampling at rate 0.0001 from one of 1 groups"),
    "a line less in the ledger": (drop_last("ledger.jsonl"), "ledger.jsonl charges 11"),
    "a line twice in the ledger": (double_last("ledger.jsonl"), "ledger.jsonl cannot be read"),
    "a line too many in the ledger": (charge_more, "ledger.jsonl charges 13 rounds"),
    "a gap in the ledger": (edit(r'^.*"round": 5,.*\n', "", "ledger.jsonl"), "ledger.jsonl cannot be read"),
    "a line less in the metrics": (drop_last("metrics.jsonl"), "metrics.jsonl 11"),
    "a line twice in the metrics": (double_last("metrics.jsonl"), "has rounds twice: 11"),
    "a gap in the metrics": (edit(r'^.*"round": 5,.*\n', "", "metrics.jsonl"), "lacks rounds: 5"),
    "a round far ahead in the metrics": (edit('"round": 11,', '"round": 9000000000000000,', "metrics.jsonl"),
        "lacks rounds: 11, 12, 13, 14, 15"),
    "a damaged line in the metrics": (edit(r'^{"round": 5,', "x", "metrics.jsonl"), "damaged"),
    "a greater epsilon in the metrics": (edit('"epsilon": ', '"epsilon": 9', "metrics.jsonl", 0), "has epsilon 9"),
    "another delta in the metrics": (edit('"delta": ', '"delta": 1', "metrics.jsonl", 0), "has delta"),
    "a round less in ledger and metrics": (drop_last("ledger.jsonl", "metrics.jsonl"), "metrics.jsonl 11"),
    "fewer rounds in the settings": (edit("^rounds = 12", "rounds = 11", "settings.toml"), "settings.toml 11"),
    "more users in the settings": (edit("^population_size = 60", "population_size = 600", "settings.toml"), "600"),
    "another cohort in the settings": (edit("^cohort_size = 12", "cohort_size = 6", "settings.toml"), "6 of 60"),
    "more noise in the settings": (edit(Z, "# noise_multiplier = 3.0", "settings.toml"), "Theorem 1"),
    "no noise on updates in the settings": (
        edit(r"^# delta_noise_multiplier = .*", "# delta_noise_multiplier = 0.1", "settings.toml"), "Theorem 1"),
    "a noise without a square in the settings": (
        edit(r"^# delta_noise_multiplier = .*", "# delta_noise_multiplier = 1e-200", "settings.toml"), "Theorem 1"),
    "users that are no number in the settings": (
        edit("^population_size = 60", "population_size = 1e400", "settings.toml"), "must be whole numbers"),
    "less noise on the count": (edit(r"^# count_stddev = .*", "# count_stddev = 0.9", "settings.toml"), "Theorem 1"),
    "no noise on record": (edit(Z + "\n", "", "settings.toml"), "does not say how much noise"),
    "another delta in the settings": (edit(r"^# delta = .*", "# delta = 1e-9", "settings.toml"), "delta is"),
    "another relation in the settings": (
        edit(r"^# relation = .*", "# relation = 'zero-out'", "settings.toml"), "relation is"),
    "a seed that is guessed": (edit("^seed = .*", "seed = 3", "settings.toml"), "seed 3, which is easily guessed"),
    "a checkpoint that is none": (
        lambda path: (path / "checkpoint.safetensors").write_bytes(b"junk"), "checkpoint.safetensors is damaged"),
    "less epsilon in the last metrics": (drop_epsilon, "metrics.jsonl ends with epsilon"),
    "another metric in the card": (
        edit_card(lambda card: card["metrics"].update(accuracy=0.99)), "accuracy is 0.99 in the model's card"),
    "the metric of another round": (edit_card(lambda card: card.update(model_rounds=3)), "in metrics.jsonl after 3"),
    "a round that never was": (edit_card(lambda card: card.update(model_rounds=40)), "released after 40 rounds"),
    "another rate in the card": (edit_card(lambda card: card["settings"]["local"].update(lr=0.3)), "local.lr is 0.3"),
    "other facts in the card": (edit_card(lambda card: card.update(facts={"data": "own"})), "data is 'own' in the"),
    "less epsilon in the settings": (edit("^epsilon = 8.0", "epsilon = 2.0", "settings.toml"), "epsilon is 2 in"),
    "another delta asked for": (
        edit(r"^\[privacy\]", "[privacy]\ndelta = 1e-7", "settings.toml"), "delta is 1e-07 in settings.toml"),
    "settings that are no TOML": (edit("^rounds = 12", "rounds 12", "settings.toml"), "settings.toml cannot be read"),
}  # fmt: skip


def test_an_honest_run_has_no_problem_and_both_accountants_agree(run):
    found = verify(run)
    assert found.problems == ()
    assert found.guarantee.epsilon == pytest.approx(8.0, abs=1e-3)
    assert found.guarantee.epsilon <= found.renyi < 12
    assert found.finished


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_one_file_is_found(copy, name):
    change, words = EDITS[name]
    change(copy)
    assert words in " ".join(verify(copy).problems)


def all_alike(path):
    """Every file tells of ten times the noise: nothing contradicts anything."""
    before = json.loads((path / "ledger.jsonl").read_text().splitlines()[0])["noise_multiplier"]
    delta_z = (100 * before**2) ** -1 - (2 * verify(path).files.notes["count_stddev"]) ** -2
    edit('"noise_multiplier": [0-9.]+', f'"noise_multiplier": {10 * before!r}', "ledger.jsonl", 0)(path)
    edit(Z, f"# noise_multiplier = {10 * before!r}", "settings.toml")(path)
    if delta_z <= 0:
        edit(r"^# count_stddev = .*", "# count_stddev = 100.0", "settings.toml")(path)
        delta_z = (100 * before**2) ** -1 - 200.0**-2
    edit(r"^# delta_noise_multiplier = .*", f"# delta_noise_multiplier = {delta_z**-0.5!r}", "settings.toml")(path)
    edit('"epsilon": [0-9.]+', f'"epsilon": {verify(path).guarantee.epsilon!r}', "metrics.jsonl", 0)(path)
    found = verify(path)
    notes, again = found.files.notes, found.guarantee

    def forge(card):
        card["resolved"].update({name: notes[name] for name in card["resolved"]})
        card["guarantee"].update(epsilon=again.epsilon, order=again.order, accountant=again.accountant, text=str(again))

    edit_card(forge)(path)
    with safe_open(path / "model.safetensors", "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_tensors(tensors, path / "model.safetensors", {**metadata, "guarantee": str(again)})


def test_edits_of_all_files_alike_are_found_by_a_seal_that_was_noted_before(copy):
    noted = seal(copy)
    all_alike(copy)
    assert verify(copy).problems == ()
    assert verify(copy).guarantee.epsilon < 1
    done = CliRunner().invoke(app, ["verify", str(copy), "--seal", noted], standalone_mode=False)
    assert done.return_value == 1
    assert "and not" in done.stderr


def test_the_seal_covers_every_number_but_not_the_seed(copy):
    before = seal(copy)
    edit(r"^seed = .*", "seed = 5", "settings.toml")(copy)
    assert seal(copy) == before
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert seal(copy) != before


def test_a_signature_holds_for_the_signed_run_and_the_named_signer_only(copy, tmp_path):
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed")
    for name in ("mine", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    sign_run(copy, tmp_path / "mine")
    for name in ("mine", "other"):
        key = " ".join((tmp_path / f"{name}.pub").read_text().split()[:2])
        (tmp_path / f"{name}.signers").write_text(f"{name}@example.org {key}\n")
    assert check_signature(copy, tmp_path / "mine.signers") == "mine@example.org"
    with pytest.raises(RunError, match="ssh-keygen refused"):
        check_signature(copy, tmp_path / "other.signers")
    drop_last("ledger.jsonl")(copy)
    with pytest.raises(RunError, match="ssh-keygen refused"):
        check_signature(copy, tmp_path / "mine.signers")


def test_the_command_says_what_it_found(run, copy):
    good = CliRunner().invoke(app, ["verify", str(run)], standalone_mode=False)
    assert good.return_value == 0
    assert good.stderr == (
        "warning: cohorts and noise come from a seed: whoever knows it, as from settings.toml, can subtract the noise\n"
    )
    assert "all files agree with the ledger" in good.stdout
    assert seal(run) in good.stdout
    drop_last("ledger.jsonl")(copy)
    bad = CliRunner().invoke(app, ["verify", str(copy), "--json"], standalone_mode=False)
    assert bad.return_value == 1
    assert "ledger.jsonl charges 11" in " ".join(json.loads(bad.stdout)["problems"])
    for path, words in (
        (copy.parent, r"holds 1 runs: give one of them, such as '.*copy'"),
        (copy / "other", "does not exist: give a run directory"),
        (copy / "metrics.jsonl", "holds no run"),
    ):
        with pytest.raises(RunError, match=words):
            verify(path)
    for file in ("settings.toml", "ledger.jsonl", "metrics.jsonl"):
        (copy / file).unlink()
    with pytest.raises(RunError, match=r"is a saved model, which has no ledger\.jsonl: give the directory of its run"):
        verify(copy)


def test_a_seed_that_anybody_may_guess_is_named_unless_nobodys_data_were_trained_on(copy):
    edit("^seed = .*", "seed = 3", "settings.toml")(copy)
    done = CliRunner().invoke(app, ["verify", str(copy), "--json"], standalone_mode=False)
    assert done.return_value == 1
    assert ["which is easily guessed" in one for one in json.loads(done.stdout)["problems"]] == [True]
    with pytest.raises(RunError, match="which is easily guessed"):
        write_cards(copy, copy / "card")
    with (copy / "settings.toml").open("a") as file:
        file.write('\n[facts]\ndata = "embedded"\n')
    assert not any("guessed" in one for one in verify(copy).problems)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("name", ["settings.toml", "ledger.jsonl", "metrics.jsonl", "model.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(copy, name):
    (copy / name).unlink()
    os.mkfifo(copy / name)
    assert f"{name} is missing" in verify(copy).problems
    read_run_directory(copy)
    with pytest.raises(RunError):
        write_cards(copy, copy / "card")
    if name == "settings.toml":
        with pytest.raises(SettingError, match=r"cannot be read as TOML .*no regular file but a pipe or a device"):
            read_toml(copy / name)


def test_the_model_of_an_interruption_after_which_the_run_went_on_is_no_contradiction(tmp_path):
    class Stop(cl.Callback):
        stop_requested = False

        def __init__(self, after, error=None):
            self.after, self.error = after, error

        def on_round(self, report, state):
            self.stop_requested = state.round_index == self.after
            if self.stop_requested and self.error:
                raise self.error

    def made():
        return small_training(8, seed=1 << 60)

    made().run([cl.RunDirectory(tmp_path / "r"), Stop(3)])
    assert verify(tmp_path / "r").problems == ()
    cut = shutil.copytree(tmp_path / "r", tmp_path / "cut")
    drop_last("ledger.jsonl", "metrics.jsonl")(cut)
    assert "the model's card has 3 rounds and ledger.jsonl charges 2" in verify(cut).problems
    with pytest.raises(OSError, match="gone"):
        made().resume(tmp_path / "r", [Stop(6, OSError("gone"))])
    found = verify(tmp_path / "r")
    assert (found.problems, found.guarantee.rounds, found.finished) == ((), 6, False)


def test_an_interrupted_run_that_a_metric_could_have_ended_is_checked_for_all_rounds_of_its_budget(tmp_path):
    """The budget of 6 rounds is less than the plan of 8: by the ledger alone epsilon would be that of 3."""
    six = small_training(6, seed=1 << 60).planned
    made = small_training(8, privacy=cl.Privacy(noise_multiplier=0.5, max_epsilon=six.epsilon), seed=1 << 60)
    measure = cl.Evaluate(lambda model: {"loss": 1.0}, every=1)
    made.run([cl.RunDirectory(tmp_path), measure, cl.EarlyStopping("loss", patience=9), StopAfter(3)])
    found = verify(tmp_path)
    assert (found.problems, found.finished, found.ledger.rounds) == ((), False, 6)
    assert found.guarantee.epsilon == six.epsilon
