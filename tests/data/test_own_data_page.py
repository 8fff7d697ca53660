"""The code of docs/howto/own_data.md runs as printed."""

import re

from samples import ROOT

PAGE = (ROOT / "docs" / "howto" / "own_data.md").read_text(encoding="utf-8")


def test_the_page_runs_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scope = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/howto/own_data.md", "exec"), scope)
    shown = capsys.readouterr().out
    assert "600 users, 6000 examples of trip, late" in shown
    assert "zero-out" in shown
    assert scope["result"].guarantee.epsilon <= 8.0
    assert scope["result"].metrics["accuracy"] > 0.8  # the commonest answer gives 0.5
    assert len(scope["train"]) + len(scope["test"]) == 600
