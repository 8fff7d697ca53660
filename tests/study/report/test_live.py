import http.client
import json
import threading

import pytest
from reported_runs import add_rounds, end_run, write_record, write_run

from clipline.errors import RunError, SettingError
from clipline.study.report.page import live_server


@pytest.fixture
def serve():
    servers = []

    def start(path):
        server = live_server(path)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return server.server_address

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def get(address, path, **headers):
    connection = http.client.HTTPConnection(*address, timeout=10)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), text


def test_it_follows_a_run_from_an_empty_folder_to_its_end(serve, tmp_path):
    run = tmp_path / "r"
    run.mkdir()
    address = serve(run)
    assert address[0] == "127.0.0.1"

    def now():
        (entry,) = json.loads(get(address, "/data.json")[2])["runs"]
        return entry["rounds"], entry["state"]

    assert now() == (0, "not ended")
    run.rmdir()
    write_run(run, rounds=0)
    assert now() == (0, "not ended")
    add_rounds(run, 0, 7)
    assert now() == (7, "not ended")
    add_rounds(run, 7, 20)
    end_run(run)
    assert now() == (20, "finished")
    status, headers, text = get(address, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert 'data-poll="2.0"' in text


def test_nothing_new_is_not_sent_again(serve, tmp_path):
    run = write_run(tmp_path / "r", rounds=2)
    address = serve(run)
    status, headers, _ = get(address, "/data.json")
    assert status == 200
    assert get(address, "/data.json", If_None_Match=headers["ETag"])[::2] == (304, "")
    add_rounds(run, 2, 3)
    assert get(address, "/data.json", If_None_Match=headers["ETag"])[0] == 200


def test_other_hosts_and_other_paths_are_refused(serve, tmp_path):
    address = serve(write_run(tmp_path / "r"))
    for host in ("evil.example", f"evil.example:{address[1]}", "127.0.0.1", ""):
        assert get(address, "/data.json", Host=host)[0] == 403
    assert get(address, "/", Host=f"localhost:{address[1]}")[0] == 200
    for path in ("/settings.toml", "/../settings.toml", "/data.json/"):
        assert get(address, path)[0] == 404


def test_what_cannot_be_followed_is_refused(tmp_path):
    with pytest.raises(RunError, match="start the training first"):
        live_server(tmp_path / "nothing")
    write_record(tmp_path / "study", 1)
    with pytest.raises(RunError, match="one can be followed"):
        live_server(tmp_path / "study")
    with pytest.raises(SettingError, match="0 to 65535"):
        live_server(write_run(tmp_path / "r"), 70000)
