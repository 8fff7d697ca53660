import hashlib
import http.server
import threading

import pytest

from clipline.errors import PopulationError
from clipline_paper.data.catalogue import Download, fetch

BODY = bytes(range(256)) * 5000
RIGHT = hashlib.sha256(BODY).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """A server that knows ranges, and can break off after `stop` bytes."""

    asked: list = []  # noqa: RUF012
    stop = None
    ranges = True

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.asked.append(wanted)
        begin = int(wanted.split("=")[1].rstrip("-")) if wanted and self.ranges else 0
        if self.path != "/data.bin" or begin >= len(BODY):
            self.send_error(404 if self.path != "/data.bin" else 416)
            return
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(BODY) - begin))
        self.end_headers()
        self.wfile.write(BODY[begin : self.stop])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(Handler, "asked", [])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/data.bin"
        running.shutdown()
        thread.join()


def test_a_download_is_checked_and_not_repeated(server, tmp_path):
    seen = []
    download = Download(server, RIGHT)
    path = fetch(download, tmp_path / "new", by_hand="-", progress=lambda *now: seen.append(now))
    assert path.read_bytes() == BODY
    assert seen[-1] == (len(BODY), len(BODY))
    assert fetch(download, tmp_path / "new", by_hand="-") == path
    assert Handler.asked == [None]
    assert [left.name for left in path.parent.iterdir()] == ["data.bin"]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_goes_on_where_it_stopped(server, tmp_path, monkeypatch, ranges):
    monkeypatch.setattr(Handler, "stop", 100_000)
    with pytest.raises(PopulationError, match=r"the same command goes on|bytes are kept"):
        fetch(Download(server, RIGHT), tmp_path, by_hand="-")
    assert (tmp_path / "data.bin.part").read_bytes() == BODY[:100_000]
    monkeypatch.setattr(Handler, "stop", None)
    monkeypatch.setattr(Handler, "ranges", ranges)
    assert fetch(Download(server, RIGHT), tmp_path, by_hand="-").read_bytes() == BODY
    assert Handler.asked == [None, "bytes=100000-"]


def test_another_checksum_is_refused_and_removed(server, tmp_path):
    with pytest.raises(PopulationError, match=r"has checksum .* was published"):
        fetch(Download(server, "0" * 64), tmp_path, by_hand="-")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "data.bin").write_bytes(b"mine")
    with pytest.raises(PopulationError, match="has checksum"):
        fetch(Download(server, RIGHT), tmp_path, by_hand="-")
    assert (tmp_path / "data.bin").read_bytes() == b"mine"  # we did not make it


def test_a_missing_page_and_a_missing_network_say_the_manual_way(server, tmp_path):
    with pytest.raises(PopulationError, match="answers 404 Not Found: copy it by hand"):
        fetch(Download(server + "x"), tmp_path / "new", by_hand="copy it by hand")
    with pytest.raises(PopulationError, match=r"cannot be reached .*: copy it by hand"):
        fetch(Download("http://127.0.0.1:1/data.bin"), tmp_path / "new", by_hand="copy it by hand", timeout=2)
    assert list(tmp_path.iterdir()) == []
