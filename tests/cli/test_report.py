import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from reported_runs import write_run
from samples import ROOT


def test_report_prints_the_path_of_its_file(clipline, tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    assert clipline("report", "a") == (0, "a/report.html\n", "")
    assert clipline("report", "a", "b", "--out", "both.html") == (0, "both.html\n", "")
    own = (tmp_path / "a" / "report.html").read_text()
    assert "a, b" in (tmp_path / "both.html").read_text()
    assert clipline("report", "a", "b") == (0, "report.html\n", "")
    assert (tmp_path / "a" / "report.html").read_text() == own  # of the run alone, as it was


def test_files_that_contradict_each_other_are_told_in_the_terminal_too(clipline, tmp_path):
    ledger = write_run(tmp_path / "a") / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"noise_multiplier": 1.0', '"noise_multiplier": 9.0'))
    code, out, err = clipline("report", "a")
    assert (code, out) == (0, "a/report.html\n")
    assert err.startswith("warning: a: ledger.jsonl charges a noise multiplier of 9, settings.toml has 1: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "does not exist"),
        (["."], "holds no run"),
        (["run", "--port", "8000"], "add --live"),
        (["run", "run", "--live"], "give one"),
        (["run", "--live", "--out", "x.html"], "drop one of the two"),
        (["run", "--live", "--port", "99999"], "0 to 65535"),
    ],
)
def test_what_cannot_be_reported_is_refused_in_one_sentence(clipline, tmp_path, arguments, words):
    if arguments != ["."]:
        write_run(tmp_path / "run")
    code, out, err = clipline("report", *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("there", [True, False])
def test_live_serves_until_ctrl_c_and_waits_for_a_run_that_has_not_begun(tmp_path, there):
    if there:
        write_run(tmp_path / "r")
    live = subprocess.Popen(
        [sys.executable, "-m", "clipline", "report", "--live", str(tmp_path / "r")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    if not there:
        assert live.stderr.readline() == f"waiting for {tmp_path / 'r'} ...\n"
        write_run(tmp_path / "r")
    url = re.match(r"(http://127\.0\.0\.1:\d+/) follows", live.stdout.readline())[1]
    with urllib.request.urlopen(url) as page:
        assert b"uPlot" in page.read()
    live.send_signal(signal.SIGINT)
    out, err = live.communicate(timeout=20)
    assert (live.returncode, out, err) == (0, "", "ended\n")


@pytest.mark.parametrize("command", ["report", "plan"])
def test_a_bare_command_shows_its_usage_and_an_example(clipline, command):
    code, out, err = clipline(command)
    assert (code, err) == (2, "")
    assert out.startswith(f"Usage: clipline {command} ")
    assert f"Example:  clipline {command} " in out
    assert len(out.splitlines()) == 5


def test_a_page_is_opened_on_request(clipline, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    write_run(tmp_path / "r")
    assert clipline("report", "r", "--open")[0] == 0
    assert opened == [(tmp_path / "r" / "report.html").as_uri()]
