"""A headless Chromium that a test drives: real keys, real clicks, the real page.

It speaks the DevTools protocol over two pipes: JSON messages terminated by a zero byte.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Chromium", "chromium_path"]

_KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35, "Tab": 9,
         "Escape": 27, "Enter": 13, "+": 187}  # fmt: skip
# Keys that also insert text, with which a button is pressed.
_WRITTEN = {"Enter": "\r", "+": "+"}
_DEADLINE_S = 60.0


def chromium_path() -> str | None:
    """Return the browser's executable; None if none is installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Chromium:
    """One page in a browser; a context manager that closes the browser.

    Args:
        width: Of the window, in CSS pixels.
        height: Likewise.
        dark: Prefer dark colours.
    """

    def __init__(
        self, *, width: int = 1200, height: int = 900, dark: bool = False
    ) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-")
        self._ids = itertools.count(1)
        self._unread = b""
        self.events: list[dict[str, Any]] = []
        """Events that the browser has sent unprompted."""
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        program = (
            f'exec "$0" --headless=new --no-sandbox --disable-gpu --hide-scrollbars '
            f"--no-first-run --disable-dev-shm-usage --disable-background-networking "
            f'--remote-debugging-pipe --user-data-dir="$1" '
            f"--window-size={width},{height} about:blank "
            f"3<&{command_read} 4>&{answer_write}"
        )
        path = chromium_path()
        assert path is not None
        self._process = subprocess.Popen(
            ["bash", "-c", program, path, self._profile.name],
            pass_fds=(command_read, answer_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(command_read)
        os.close(answer_write)
        self._session: str | None = None
        try:
            self._attach(width, height, dark)
        except BaseException:
            self.close()
            raise

    def _attach(self, width: int, height: int, dark: bool) -> None:
        (target,) = [
            found
            for found in self.call("Target.getTargets")["targetInfos"]
            if found["type"] == "page"
        ]
        self._session = self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            found = self._next(deadline)
            if found.get("id") == number:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result
            self.events.append(found)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            left = deadline - time.monotonic()
            assert left > 0, "the browser does not answer"
            if select.select([self._read], [], [], left)[0]:
                data = os.read(self._read, 1 << 20)
                assert data, "the browser has ended"
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, path: Path, view: str = "learning") -> None:
        """Open a page; wait until it is loaded and shows something."""
        self.open_address(f"{path.as_uri()}#{view}")

    def open_address(self, url: str) -> None:
        """Open a page by its address in the same way."""
        self.call("Page.navigate", url=url)
        self.wait(
            "document.readyState === 'complete' && location.protocol !== 'about:' && "
            "document.querySelector('main [role=tabpanel]:not([hidden])') !== null"
        )

    def evaluate(self, expression: str) -> Any:
        """Return the JSON value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression,
                          returnByValue=True, awaitPromise=True)  # fmt: skip
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + _DEADLINE_S
        # Evaluate the condition again after each frame.
        frame = "new Promise((resolve) => setTimeout(resolve, 20))"
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"never true: {expression}"
            self.evaluate(frame)

    def text(self, selector: str = "[role=tabpanel]:not([hidden])") -> str:
        """Return the visible text."""
        quoted = json.dumps(selector)
        return str(self.evaluate(f"document.querySelector({quoted}).innerText"))

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": _WRITTEN[key]} if key in _WRITTEN else {}
        down = "keyDown" if text else "rawKeyDown"
        for kind, more in ((down, text), ("keyUp", {})):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                      windowsVirtualKeyCode=_KEYS[key], **more)  # fmt: skip

    def type(self, text: str) -> None:
        """Type text into the focused element."""
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Click the centre of an element with the mouse."""
        quoted = json.dumps(selector)
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({quoted}); "
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left",
                      clickCount=1)  # fmt: skip

    def screenshot(self, path: Path) -> None:
        """Save a screenshot of the window as a PNG file."""
        found = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    def complaints(self) -> list[str]:
        """Return exceptions, content-policy violations, and opened dialogs."""
        self.evaluate("0")  # pending messages have then arrived
        found = []
        for event in self.events:
            parameters = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(parameters["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded":
                found.append(str(parameters["entry"]["text"]))
            elif event.get("method") == "Page.javascriptDialogOpening":
                found.append(f"dialog: {parameters['message']}")
        return found

    def requests(self) -> list[str]:
        """Return the requested addresses."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        """Close the browser."""
        os.close(self._write)
        os.close(self._read)
        # It exits when its pipes are closed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)
        shutil.rmtree(self._profile.name, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._profile.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
