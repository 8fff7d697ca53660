"""The documentation site: it builds without a warning and opens from disk."""

import re
import subprocess
import sys
from urllib.parse import quote

import pytest
from chromium import Chromium, find_chromium
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
        assert not re.search(r"<dl[^>]*>\s*<dd", page), f"{source}: to a screen reader a list without terms is none"
        asked = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]*)"', page)
        asked += re.findall(r'<link[^>]*rel="stylesheet"[^>]*href="([^"]*)"', page)
        assert asked
        assert not [one for one in asked if one.startswith(("http:", "https:", "//"))], source


SOUGHT = {
    "how to resume": "howto/resume",
    "what is delta": "start/questions",
    "check epsilon": "howto/sign",
    "what can a user see of another": "start/questions",
    "client rate": "howto/learning",
    "write a clip rule": "howto/clip_rule",
    "max_participations": "howto/federation",
    "two GPUs": "howto/workers",
    "predict saved model": "howto/own_model",
    "what does a seed cost": "start/questions",
}


def test_search_leads_a_newcomer_to_ten_things(site, tmp_path):
    find_chromium()
    browser = Chromium(tmp_path)
    try:
        for sought, page in SOUGHT.items():
            browser.send("Page.navigate", url=f"{(site / 'search.html').as_uri()}?q={quote(sought)}")
            browser.wait("document.querySelector('.search-summary')?.textContent.includes('finished')")
            hits = browser.run("[...document.querySelectorAll('#search-results li > a')].map(a => a.href)")
            assert any(f"/{page}.html" in hit for hit in hits[:5]), (sought, hits[:5])
    finally:
        browser.close()
