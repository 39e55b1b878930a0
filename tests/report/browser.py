"""A headless Chromium, driven over its DevTools protocol: nothing is downloaded, and no driver is
needed."""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from websockets.sync.client import connect

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
STARTS_WITHIN = 60.0  # seconds
ANSWERS_WITHIN = 120.0


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One process with a fresh profile. `page` opens a tab."""

    def __init__(self, program: str):
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-dev-shm-usage",
        ]
        command += [
            "--remote-debugging-port=0",
            f"--user-data-dir={self._profile.name}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        told, deadline = (
            Path(self._profile.name, "DevToolsActivePort"),
            time.monotonic() + STARTS_WITHIN,
        )
        while not (told.exists() and told.read_text().count("\n")):
            assert self._process.poll() is None, f"{program} ended with {self._process.returncode}"
            assert time.monotonic() < deadline, (
                f"{program} opened no debugging port within {STARTS_WITHIN:.0f} s"
            )
            time.sleep(0.05)
        self._root = f"http://127.0.0.1:{told.read_text().splitlines()[0]}"

    def page(self) -> "Page":
        with urlopen(
            Request(f"{self._root}/json/new?about:blank", method="PUT"), timeout=ANSWERS_WITHIN
        ) as answer:
            return Page(json.load(answer)["webSocketDebuggerUrl"])

    def close(self) -> None:
        # Debian's `chromium` is a script that starts it
        os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(ANSWERS_WITHIN)
        self._profile.cleanup()


class Page:
    """A tab. `errors` has what its console and its network complained of."""

    def __init__(self, url: str):
        self._socket = connect(url, max_size=None)
        self._sent = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=ANSWERS_WITHIN))
            if message.get("id") == self._sent:
                assert "error" not in message, f"{method}: {message}"
                return message["result"]
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, event: str | None, told: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["exceptionDetails"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(told["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(told["args"]))
        elif event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])

    def evaluate(self, script: str) -> Any:
        """The value of the expression, awaited if it is a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Until the expression is true. Returns its value."""
        deadline = time.monotonic() + ANSWERS_WITHIN
        while not (value := self.evaluate(script)):
            assert time.monotonic() < deadline, (
                f"not within {ANSWERS_WITHIN:.0f} s: {script}; {self.errors}"
            )
            time.sleep(0.02)
        return value

    def wait_for_element(self, selector: str) -> None:
        self.wait_for(f"document.querySelector({json.dumps(selector)}) !== null")

    def open(self, path: Path, fragment: str = "") -> int:
        """Opens the report. Returns the milliseconds until it was complete."""
        self.call("Page.navigate", url=path.as_uri() + fragment)
        return int(self.wait_for("document.documentElement?.dataset.ready || 0"))

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )

    def prefer(self, theme: str) -> None:
        """What the system says, `light` or `dark`."""
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": theme}],
        )

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of what the selector finds, which must be in reach of
        it."""
        found = json.dumps(selector)
        self.evaluate(
            f"document.querySelector({found}).scrollIntoView({{block: 'center', behavior: 'instant'}})"
        )
        box = f"document.querySelector({found}).getBoundingClientRect()"
        x, y = self.evaluate(
            f"(() => {{ const b = {box}; return [b.x + b.width / 2, b.y + b.height / 2]; }})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def fill(self, name: str, value: str) -> None:
        """Sets a field of the filters, as a user's input does."""
        self.evaluate(
            f"(() => {{ const field = document.getElementById('filters').elements[{json.dumps(name)}];"
            f"field.value = {json.dumps(value)}; field.dispatchEvent(new Event('input', {{bubbles: true}})); }})()"
        )

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self.call("Page.close")
        self._socket.close()
