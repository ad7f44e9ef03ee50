"""Chromium, driven through a pipe as its developer tools do it: opens pages, runs scripts in them, takes pictures."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import until
from trainer.reports.convert_svg import BROWSERS

OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]


def found() -> str:
    named = os.environ.get("OCTET_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    return named or pytest.skip("no Chromium on this machine: install one, or set OCTET_BROWSER to its path")


class Browser:
    """Commands go down one pipe, and answers and events come up another, each ended by a zero byte."""

    def __init__(self, down: int, up: int) -> None:
        self.down, self.up, self.rest, self.number = down, os.fdopen(up, "rb", 0), b"", 0
        self.events: list[dict[str, Any]] = []

    def __call__(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        said = {"id": self.number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self.down, json.dumps(said).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                more = self.up.read(1 << 16)
                assert more, "the browser has ended"
                self.rest += more
            one, _, self.rest = self.rest.partition(b"\0")
            answer = json.loads(one)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, address: str, width: int = 1280, height: int = 900) -> "Page":
        target = self("Target.createTarget", url="about:blank")["targetId"]
        page = Page(self, self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"], target)
        for domain in ("Page", "Runtime", "Log", "DOM"):
            page(f"{domain}.enable")
        page.size(width, height)
        page("Page.navigate", url=address)
        until(lambda: page.js("document.readyState") == "complete")
        return page


class Page:
    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.browser, self.session, self.target = browser, session, target

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser(method, self.session, **parameters)

    def js(self, script: str) -> Any:
        """Return the value of a script, or of what it promises."""
        options = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        answer = self("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def size(self, width: int, height: int = 900) -> None:
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def text(self, selector: str) -> str:
        return self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def click(self, selector: str) -> None:
        self.js(f"document.querySelector({json.dumps(selector)}).click()")

    def write(self, **fields: str) -> None:
        for name, value in fields.items():
            field = f"document.getElementById('choices').elements[{json.dumps(name)}]"
            self.js(
                f"{field}.value = {json.dumps(value)}; {field}.dispatchEvent(new Event('input', {{bubbles: true}}))"
            )

    def drop(self, path: Path) -> None:
        """Drop a file as a person does, outside of the place for it."""
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self("Input.dispatchDragEvent", type=kind, x=640, y=20, data=data)

    def press(self, key: str) -> None:
        """Press a key: Tab, Enter, or a character."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r")}.get(key, (ord(key[0].upper()), key))
        for kind in ("keyDown", "keyUp"):
            about = {"text": text} if text and kind == "keyDown" else {}
            self("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **about)

    def tab_to(self, selector: str) -> None:
        for _ in range(200):
            self.press("Tab")
            if self.js(f"document.activeElement.matches({json.dumps(selector)})"):
                return
        raise AssertionError(f"no key leads to {selector}")

    def start(self, action: str = "train") -> None:
        """Start a run, or resume it, also beside those that others have on this machine."""
        self.js("document.getElementById('said').textContent = ''")
        self.click(f"[data-do={action}]:not(#said *)")
        until(lambda: self.text("#said"), say=lambda: self.text("main"))
        if "in progress" in self.text("#said"):
            self.click("#said [data-do]")

    def until(self, selector: str, words: str, seconds: float = 120) -> None:
        until(lambda: words in self.text(selector), seconds, lambda: self.text("main"))

    def picture(self) -> bytes:
        return base64.b64decode(self("Page.captureScreenshot", captureBeyondViewport=True, format="png")["data"])

    def complaints(self) -> list[str]:
        """Return what the console of this page has said: errors, and what its policy has refused."""
        own = [one for one in self.browser.events if one.get("sessionId") == self.session]
        return [str(one["params"]) for one in own if one["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")]

    def close(self) -> None:
        self.browser("Target.closeTarget", targetId=self.target)


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    theirs_down, down = os.pipe()
    up, theirs_up = os.pipe()
    shell = f'exec 3<&{theirs_down} 4>&{theirs_up}; exec "$0" "$@"'  # its numbers are fixed
    command = [found(), *OPTIONS, f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe", "about:blank"]
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(["bash", "-c", shell, *command], pass_fds=(theirs_down, theirs_up), stderr=log)
    os.close(theirs_down)
    os.close(theirs_up)
    browser = Browser(down, up)
    try:
        yield browser
    finally:
        process.terminate()
        process.wait()
        browser.up.close()
        os.close(down)
