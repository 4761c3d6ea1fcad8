"""A headless Chromium for tests, driven by its debugging protocol through two pipes."""

import base64
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECONDS = 60.0
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
    "--ignore-certificate-errors",
    "--remote-debugging-pipe",
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


class Tab:
    """One page. complaints: exceptions of its scripts, errors of its console and what its policy has refused. asked:
    addresses of all requests."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._numbers = itertools.count(1)
        self._held = b""
        self._session = ""
        self.complaints: list[str] = []
        self.asked: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self.resize(1200, 1000)

    def open(self, url: str) -> None:
        assert "errorText" not in self._call("Page.navigate", url=url)

    def resize(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def colors(self, scheme: str) -> None:
        """scheme: dark or light."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def run(self, script: str) -> Any:
        """Returns the value of an expression in the page."""
        result = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """Returns the text that a reader sees in an element; empty if it is hidden or missing."""
        return self.run(
            f"((one) => one && one.checkVisibility() ? one.innerText : '')(document.querySelector({selector!r}))"
        )

    def until(self, selector: str, *wanted: str) -> str:
        """Returns the text of an element, once it contains all of these."""
        deadline = time.monotonic() + SECONDS
        while not all(one in (text := self.text(selector)) for one in wanted):
            assert time.monotonic() < deadline, f"{selector} has {text!r}; {wanted} are missing; {self.complaints}"
            time.sleep(0.1)
        return text

    def type(self, selector: str, text: str) -> None:
        """Types into a field and presses Enter, as a person does."""
        self.run(f"document.querySelector({selector!r}).focus()")
        self._call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
            )

    def picture(self, file: Path) -> None:
        """Saves the whole page as PNG."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(taken["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._read], [], [], SECONDS)
            assert ready, "the browser does not answer"
            block = os.read(self._read, 1 << 16)
            assert block, "the browser has ended"
            self._held += block
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str, values: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(str(values["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and values["type"] == "error":
            self.complaints += [str(one.get("description", one.get("value"))) for one in values["args"]]
        elif event == "Log.entryAdded" and values["entry"]["source"] != "network":  # statuses of answers are no fault
            self.complaints.append(values["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.asked.append(values["request"]["url"])


@contextmanager
def open_tab() -> Iterator[Tab]:
    """Opens a tab in a browser of its own, which ends with the context."""
    assert CHROMIUM is not None
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        redirected = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        command = ["bash", "-c", redirected, "browser", CHROMIUM, *OPTIONS, f"--user-data-dir={folder}"]
        process = subprocess.Popen(
            command,
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"HOME": folder},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Tab(ours_out, ours_in)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=SECONDS)
            os.close(ours_in)
            os.close(ours_out)
