"""A real browser for tests: Debian's Chromium without a screen, driven over its DevTools protocol."""

import base64
import json
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest


def find_chromium() -> str:
    """The browser's path; the test that asks is skipped where there is none."""
    pytest.importorskip("websockets", reason="websockets is not installed: pip install 'clipline[dev]'")
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    return found


class Chromium:
    """One browser with one page. `errors` has what the page logged as an error, `requests` what it asked for."""

    def __init__(self, profile: Path) -> None:
        from websockets.sync.client import connect

        self._process = subprocess.Popen(
            [find_chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
             "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._at_end = ExitStack()
        self._at_end.callback(self._process.wait, 10)
        self._at_end.callback(self._process.terminate)
        port_file, until = profile / "DevToolsActivePort", time.monotonic() + 30
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert self._process.poll() is None, "Chromium ended"
            assert time.monotonic() < until, "Chromium does not start"
            time.sleep(0.02)
        port, path = port_file.read_text().split()
        self._socket = self._at_end.enter_context(connect(f"ws://127.0.0.1:{port}{path}", max_size=None))
        self._number, self._session = 0, None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params):
        """One command, and its result. Events that come meanwhile are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=30))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _note(self, event) -> None:
        name, params = event.get("method"), event.get("params", {})
        if name == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif name == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"]))
        elif name == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif name == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Open a page of ours and wait until it is drawn."""
        self.errors.clear()
        self.requests.clear()
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=url)
        self.wait("document.documentElement && document.documentElement.dataset.ready === 'true'")

    def run(self, script: str):
        """The value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Until a JavaScript expression is true."""
        until = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < until, f"never true: {condition}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """A key, down and up, where the focus is."""
        codes = {"Enter": 13, " ": 32, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37}
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key], text=text)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """The page as PNG."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf(self, path: Path) -> None:
        """The page as it prints."""
        data = self.send("Page.printToPDF", printBackground=False, paperWidth=8.27, paperHeight=11.69)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser."""
        self._at_end.close()
