"""The documentation site: it builds without a warning and opens from disk."""

import re
import subprocess
import sys

import pytest
from samples import ROOT

pytest.importorskip("furo", reason="Sphinx is not installed: pip install 'clipline[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", ROOT / "docs", out]
    built = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    return out


def test_every_page_is_built_and_asks_nothing_of_the_network(site):
    for source in (ROOT / "docs").rglob("*.md"):
        page = (site / source.relative_to(ROOT / "docs").with_suffix(".html")).read_text(encoding="utf-8")
        assert "<h1>" in page, source
        asked = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]*)"', page)
        asked += re.findall(r'<link[^>]*rel="stylesheet"[^>]*href="([^"]*)"', page)
        assert asked
        assert not [one for one in asked if one.startswith(("http:", "https:", "//"))], source


def test_search_finds_a_page_by_a_word_of_its_text(site):
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert index.startswith("Search.setIndex(")
    assert '"epsilon"' in index or "epsilon:" in index
