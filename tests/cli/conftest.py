import sys

import pytest

from clipline.cli import main


@pytest.fixture
def clipline(monkeypatch, capsys, tmp_path):
    """Run the command line in an empty folder; gives exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLIPLINE_DATA", raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["clipline", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run
