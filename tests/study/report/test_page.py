import html.parser
import json
import re
from concurrent.futures import ThreadPoolExecutor
from importlib import resources

import pytest
from reported_runs import write_run
from samples import ROOT

from clipline.study.report import write_report

ATTACK = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"


class Reader(html.parser.HTMLParser):
    """Elements and addresses of a page, as a parser sees them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]


def embedded(text):
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_report_of_several_runs_lies_above_them_and_names_them_apart(tmp_path):
    runs = [write_run(tmp_path / "study" / folder / "run") for folder in ("low", "high")]
    assert write_report(runs) == tmp_path / "study" / "report.html"
    assert embedded((tmp_path / "study" / "report.html").read_text())["title"] == "low/run, high/run"
    assert write_report([runs[0], runs[0]]) == runs[0] / "report.html"


def test_a_title_says_task_data_and_run(tmp_path):
    """`new-task` calls the folder of the run so, which alone says nothing."""
    run = write_run(tmp_path / "rides" / "run")
    write_report([run])
    assert embedded((run / "report.html").read_text())["title"] == "rides, data own, run rides/run"


def test_text_of_runs_cannot_become_html(tmp_path):
    run = write_run(tmp_path / ATTACK.replace("/", "∕"), server=json.dumps(ATTACK), task=json.dumps(ATTACK))
    text = write_report([run], tmp_path / "report.html").read_text()
    plain = write_report([write_run(tmp_path / "plain")], tmp_path / "plain.html").read_text()
    assert Reader(text).tags == Reader(plain).tags
    assert ATTACK in dict(embedded(text)["shared_settings"])["server"]


def test_a_page_asks_for_nothing_and_allows_only_its_own_scripts(tmp_path):
    text = write_report([write_run(tmp_path / "r")]).read_text()
    assert Reader(text).addresses == ["data:,", "#page"]
    policy = re.search(r'Security-Policy" content="([^"]+)"', text)[1]
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "'unsafe-inline'" not in re.search("script-src([^;]*)", policy)[1]


def test_without_javascript_the_statement_and_the_warning_are_there(tmp_path):
    text = write_report([write_run(tmp_path / "r", z=0.0)]).read_text()
    plain = re.search("<noscript>(.*)</noscript>", text, re.DOTALL)[1]
    assert "NOT PRIVATE: no noise was added (r)" in plain
    assert "r: not private: no noise was added" in plain


def test_the_charting_library_keeps_its_licence():
    licence = resources.files("clipline.study.report").joinpath("assets", "uPlot.LICENSE").read_text()
    assert "MIT" in licence
    assert "Leon Sorokin" in licence


def test_metrics_load_in_pandas_in_one_line_as_the_page_of_documentation_says(tmp_path):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    write_run(tmp_path / "runs" / "median")
    text = (ROOT / "docs" / "howto" / "report.md").read_text()
    (line,) = re.findall(r'^rounds = pd\.(.*)\("(.*)", lines=True\)$', text, re.MULTILINE)
    assert line[0] == "read_json"
    rounds = pandas.read_json(tmp_path / line[1], lines=True)
    assert list(rounds["round"]) == list(range(20))
    assert rounds["accuracy"].count() == 4


def test_two_processes_that_write_one_report_at_once_both_do(tmp_path):
    run = write_run(tmp_path / "r")
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(write_report, [run] * 40)) == {run / "report.html"}
    assert sorted(path.name for path in run.iterdir()) == [
        "ledger.jsonl", "metrics.jsonl", "report.html", "settings.toml",
    ]  # fmt: skip
