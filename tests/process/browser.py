"""A real Chromium, driven over the W3C WebDriver protocol. Knows HTTP and JSON; not the page."""

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess

import pytest

from waiting import answers, until

__all__ = ["Browser", "browser", "needs_chromium"]

needs_chromium = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="needs chromium and chromium-driver",
)

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_ARGUMENTS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--no-first-run", "--disable-background-networking"),
]


class Browser:
    """One window."""

    def __init__(self, port, directory):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        options = {"args": [*_ARGUMENTS, f"--user-data-dir={directory}"]}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def _call(self, method, path, body=None):
        content = None if body is None else json.dumps(body)
        self._connection.request(method, path, content, {"Content-Type": "application/json"})
        value = json.loads(self._connection.getresponse().read())["value"]
        if isinstance(value, dict) and "error" in value:
            raise AssertionError(f"{value['error']}: {value['message'].splitlines()[0]}")
        return value

    def close(self):
        self._call("DELETE", self._session)
        self._connection.close()

    def open(self, url):
        self._call("POST", f"{self._session}/url", {"url": url})

    def run(self, script, *arguments):
        """What a script returns that is run in the page."""
        body = {"script": script, "args": list(arguments)}
        return self._call("POST", f"{self._session}/execute/sync", body)

    def text(self, selector="body"):
        """What a person reads there; nothing if it is hidden."""
        script = """
            const element = document.querySelector(arguments[0]);
            return element && element.checkVisibility() ? element.innerText : ''
        """
        return self.run(script, selector)

    def wait_for(self, text, selector="body"):
        """Until a text is to be read there."""
        seen = ""

        def is_there():
            nonlocal seen
            seen = self.text(selector)
            return text in seen

        try:
            until(is_there)
        except AssertionError as error:
            raise AssertionError(f"{text!r} did not appear; there is: {seen}") from error

    def _find(self, selector):
        body = {"using": "css selector", "value": selector}
        return self._call("POST", f"{self._session}/element", body)[_ELEMENT]

    def click(self, selector):
        """As a mouse would: what is covered or out of sight cannot be clicked."""
        self._call("POST", f"{self._session}/element/{self._find(selector)}/click", {})

    def type(self, selector, text):
        path = f"{self._session}/element/{self._find(selector)}"
        self._call("POST", f"{path}/value", {"text": text})

    def press(self, key):
        """A key, wherever the focus is."""
        steps = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        actions = [{"type": "key", "id": "keyboard", "actions": steps}]
        self._call("POST", f"{self._session}/actions", {"actions": actions})

    def resize(self, width, height):
        """A screen of that size; windows themselves cannot be as narrow as a phone."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme):
        """As if the system were set to light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def devtools(self, command, **parameters):
        body = {"cmd": command, "params": parameters}
        return self._call("POST", f"{self._session}/goog/cdp/execute", body)

    def complaints(self):
        """What was written to the console since the last look: errors, refused loads."""
        return [
            entry["message"]
            for entry in self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        ]


@contextlib.contextmanager
def browser(directory):
    """A window of a browser of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(directory)},
    )
    try:
        until(lambda: answers(port))
        window = Browser(port, directory / "profile")
        try:
            yield window
        finally:
            window.close()
    finally:
        driver.terminate()
        driver.wait()
