"""The federation that `clipline new-federation` writes: in one process, and deployed with TLS and node keys."""

import contextlib
import http.client
import http.server
import importlib
import json
import math
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest
from scipy.stats import norm

pytest.importorskip("flwr", reason="the extra federation is not installed")
pytest.importorskip("cryptography", reason="the extra federation is not installed")

from clipline.cli.new_federation import SCRIPTS, new_federation
from clipline.federation import InProcessGrid
from clipline.training.run_files import PARTICIPATIONS

ROUNDS = 2
MISSING = [tool for tool in ("bash", "openssl", "ssh-keygen", "setsid") if shutil.which(tool) is None]


@pytest.fixture
def folder(tmp_path):
    new_federation(tmp_path / "rides")
    return tmp_path / "rides"


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Deployment:
    """Runs the scripts of a folder on ports of its own."""

    def __init__(self, folder):
        self.folder = folder
        ports = free_ports(2)
        while max(own := free_ports(1)) + 9 in ports or own[0] > 65_000:
            pass
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.env = {**os.environ, "PATH": path, "PORT": str(ports[0]), "INNER": str(ports[1]), "OWN": str(own[0])}

    def popen(self, script, **options):
        return subprocess.Popen(["bash", "-c", script], cwd=self.folder, env={**self.env, **options})

    def run(self, script, **options):
        assert self.popen(script, **options).wait(240) == 0, self.logs()

    def log(self, name):
        return (self.folder / "state" / f"{name}.log").read_text(encoding="utf-8")

    def logs(self):
        return "\n".join(f"{path.name}\n{path.read_text()}" for path in self.folder.glob("state/*.log"))

    def group(self, name):
        return int((self.folder / "state" / f"{name}.pid").read_text())


@pytest.fixture
def deployment(folder):
    made = Deployment(folder)
    yield made
    made.popen("./down").wait(60)


def replaced(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def wait_until(true, seconds=240):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def delta_of(epsilon, noise_multiplier, rounds):
    """Of this many Gaussian releases in which every user takes part (Balle and Wang 2018, theorem 8)."""
    mu = math.sqrt(rounds) / noise_multiplier
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


@pytest.mark.deployment
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_a_deployment_goes_on_without_a_node_that_is_killed_and_one_that_is_not_registered(folder, deployment):
    """Mostly waiting: the killed node costs up to a deadline in each of two rounds. 113 s beside a load of 10."""
    replaced(folder / "app" / "rides" / "task.py", "UPLOAD = cl.SecureSum(18)", "UPLOAD = None")
    begun = time.monotonic()
    deployment.run("./make_certs && ./up")
    deadline = max(10.0, 1.5 * (time.monotonic() - begun))  # on a busy machine everything is slower
    deployment.run("ssh-keygen -q -t ecdsa -b 384 -N '' -f state/keys/stranger")
    deployment.run('./up node state/keys/stranger "127.0.0.1:$INNER" partition-id=9', NUMBER="9")
    environment = Path(f"/proc/{deployment.group('node1')}/environ").read_bytes().split(b"\0")
    assert b"FLWR_TELEMETRY_ENABLED=0" in environment

    running = deployment.popen(f'. ./settings; flwr run app ours --run-config "rounds={ROUNDS} deadline={deadline}"')
    wait_until(lambda: "Receiving: train message" in deployment.log("node3"))
    os.killpg(deployment.group("node3"), signal.SIGKILL)
    assert running.wait(240) == 0, deployment.logs()
    wait_until((folder / "run" / "guarantees.txt").exists)

    released = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in released] == list(range(ROUNDS))
    ledger = [json.loads(line) for line in (folder / "run" / "ledger.jsonl").read_text().splitlines()]
    assert [(line["round"], line["sampling"], line["rate"]) for line in ledger] == [
        (0, "poisson", 1),
        (1, "poisson", 1),
    ]
    assert ledger[0]["noise_multiplier"] == ledger[1]["noise_multiplier"]
    # Abandoned rounds are not in the epsilon, which is that of the released ones, by the exact formula.
    assert delta_of(8.0, ledger[0]["noise_multiplier"], ROUNDS) == pytest.approx(released[-1]["delta"], rel=1e-3)
    assert released[-1]["epsilon"] == pytest.approx(8.0, rel=1e-3)

    def read():
        return json.loads((folder / "run" / PARTICIPATIONS).read_text())

    wait_until(lambda: read()["replies"]["taken"] >= 2 * ROUNDS)  # it is written last of all
    kept = read()
    asked = ROUNDS + kept["abandoned"]
    killed, *others = sorted(kept["asked"].values())  # the stranger never is
    assert others == [asked] * 2
    assert 1 <= killed <= asked  # until Flower sees that it is gone, which takes up to a minute
    assert kept["replies"]["late or missing"] + kept["replies"].get("error", 0) >= killed
    wait_until(lambda: "No SuperNode found with the given public key" in deployment.log("superlink"))
    assert "Receiving" not in deployment.log("node9")


@pytest.mark.skipif(shutil.which("nginx") is None, reason="not installed: nginx")
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_the_proxy_lets_only_the_fleet_api_through(folder, deployment):
    deployment.run("./make_certs")
    seen, state = [], folder / "state"

    class Upstream(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(state / "server.pem", state / "server.key")
    with http.server.ThreadingHTTPServer(("127.0.0.1", int(deployment.env["INNER"])), Upstream) as upstream:
        upstream.socket = context.wrap_socket(upstream.socket, server_side=True)
        threading.Thread(target=upstream.serve_forever, daemon=True).start()
        deployment.run("./up proxy")
        trusting = ssl.create_default_context(cafile=state / "ca.crt")

        def status(path, body=b"x"):
            connection = http.client.HTTPSConnection("localhost", int(deployment.env["PORT"]), context=trusting)
            with contextlib.closing(connection):
                connection.putrequest("POST", path)  # as it is: nothing in the path is resolved
                connection.putheader("content-length", str(len(body)))
                connection.endheaders(body)
                return connection.getresponse().status

        large = os.urandom(5_000_000)  # an update of 1.2 million numbers
        assert status("/v1/fleet/push-object", large) == 200
        for path in (
            "/v1/control/start-run", "/v1/runtime/x", "/", "/v1/fleet/../control/start-run",
            "/v1/fleet/%2e%2e/control/start-run", "/v1/fleet/..%2fcontrol/start-run", "//v1/control/start-run",
            "/v1/control/start-run?/v1/fleet/",
        ):  # fmt: skip
            assert status(path) == 403, path
        assert status("/v1/control/start-run/..%2f../fleet/x") == 200
        upstream.shutdown()
    assert seen == [("/v1/fleet/push-object", large), ("/v1/fleet/x", b"x")]


def test_it_runs_in_one_process(folder, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(folder / "app")
    with monkeypatch.context() as patched:
        for name in ("rides", "rides.task", "rides.client", "rides.server"):
            patched.delitem(sys.modules, name, raising=False)
        client, server = importlib.import_module("rides.client"), importlib.import_module("rides.server")
        config = tomllib.loads((folder / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
        more = {"population-size": 8, "cohort-size": 8, "run-directory": str(tmp_path / "run"), "deadline": 600}
        server.serve(InProcessGrid(client.app, 8), {**config, **more})
        for name in [one for one in sys.modules if one.partition(".")[0] == "rides"]:
            del sys.modules[name]
    assert "epsilon 8.00" in capsys.readouterr().out
    ledger = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    assert len(ledger) == config["rounds"]
    kept = json.loads((tmp_path / "run" / PARTICIPATIONS).read_text())
    assert kept["replies"]["taken"] == 4 * 8 * config["rounds"]  # a secure sum has four stages


def test_the_command_writes_scripts_that_can_be_run_and_keeps_what_is_there(clipline, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, _ = clipline.ok("new-federation", "rides")
    assert "python rides/app/in_one_process.py rides/run" in out
    for script in SCRIPTS:
        assert os.access(tmp_path / "rides" / script, os.X_OK)
    page = (tmp_path / "rides" / "README.md").read_text()
    assert len(page.splitlines()) <= 40
    assert "must be new or empty" in clipline.refused("new-federation", "rides")
