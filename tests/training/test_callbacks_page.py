"""The code of docs/howto/callbacks.md runs as printed."""

import re

from samples import ROOT

PAGE = (ROOT / "docs" / "howto" / "callbacks.md").read_text(encoding="utf-8")


def test_the_page_runs_as_printed(real_curves, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scope = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/howto/callbacks.md", "exec"), scope)
    shown = capsys.readouterr()
    assert scope["result"].metrics["accuracy"] > 0.8
    assert "round 20/20  accuracy 0." in shown.err
    assert re.search(r"best after round \d+ and stopped after \d+\n\{'round': 19, 'clip': ", shown.out)
    assert re.search(r"the clip was high enough in round \d", shown.out)
    files = sorted(path.name for path in (tmp_path / "runs" / "rides").iterdir())
    assert files == ["curves.png", "ledger.jsonl", "metrics.jsonl", "model.safetensors", "settings.toml"]
    for name in files:
        assert f"`{name}`" in PAGE


def test_every_callback_is_on_the_page():
    names = ["Callback", "Curves", "EarlyStopping", "Evaluate", "Log", "Progress", "RunDirectory", "StopOnInterrupt"]
    assert not [name for name in names if name not in PAGE]
