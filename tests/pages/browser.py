"""A headless Chromium over its debugging pipe: pages are opened at a width and looked at; complaints are kept.

The pipe is the browser's own way to be driven, JSON with zero bytes between, so that nothing has to be installed
beside it: no client of web sockets, no driver of the browser's version, no port that somebody else could have.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Browser", "NoBrowserError", "find_browser"]

#: What Chromium is called in one distribution or another; the headless shell is smallest, and first.
_NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")
#: Seconds for the browser to answer anything at all; a deadline on a loaded machine, not an expectation.
_ANSWER_S = 60.0
_LOOK = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")
_SETTLED = """
new Promise(settled => {
  setTimeout(settled, 400);
  document.fonts.ready.then(() => requestAnimationFrame(() => requestAnimationFrame(settled)));
})
"""
#: Roots in containers have no sandbox of Chromium's and little in /dev/shm; nothing may be looked up or fetched.
_OPTIONS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--allow-file-access-from-files",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


class NoBrowserError(Exception):
    """There is no browser here, or none that starts; the message says which."""


def find_browser() -> str:
    """The program: ``MYCEL_TESTS_BROWSER``, or the first that the search path has.

    Raises:
        NoBrowserError: there is none.
    """
    given = os.environ.get("MYCEL_TESTS_BROWSER")
    for name in (given,) if given else _NAMES:
        if (path := shutil.which(name)) is not None:
            return path
    raise NoBrowserError(
        f"no browser: none of {', '.join(_NAMES)} is installed (apt-get install chromium-headless-shell)"
    )


class Browser:
    """One browser with one page. Close it.

    Args:
        folder: of its own, for the profile and for what it prints.

    Raises:
        NoBrowserError: it does not start here.
    """

    def __init__(self, folder: Path) -> None:
        program = find_browser()
        self._log = folder / "browser.log"
        self._number = 0
        self._pending = b""
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        # The shell's only part: the pipes are wanted as descriptors 3 and 4.
        line = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null'
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", line, program, *_OPTIONS, f"--user-data-dir={folder / 'profile'}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"HOME": str(folder)},
                start_new_session=True,
            )
        try:
            self._target = self._ask("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._ask("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._ask(f"{domain}.enable")
        except (OSError, TimeoutError) as error:
            self.close()
            said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise NoBrowserError(f"{program} does not start here: {error} {said}") from None

    def open(self, page: Path) -> None:
        """Load a page from its file.

        Raises:
            FileNotFoundError: there is no such page.
        """
        self._events.clear()
        done = self._ask("Page.navigate", url=page.as_uri())
        if "errorText" in done:  # a page of the browser's own is shown in its place
            raise FileNotFoundError(f"{page}: {done['errorText']}")
        self._until(lambda: any(event["method"] == "Page.loadEventFired" for event in self._events))
        self.value(_SETTLED)

    def complaints(self) -> list[str]:
        """What the page has complained of since it was opened: errors on its console, what it misses or fetches."""
        return [text for event in self._events if (text := _complaint(event))]

    def resize(self, width: int, height: int = 900) -> None:
        """Another window, in CSS pixels."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.value(_SETTLED)

    def look(self) -> list[str]:
        """What is wrong with the page as it is drawn now; see ``look.js``."""
        found = self.value(_LOOK)
        assert isinstance(found, list)
        return found

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives, or what it promises."""
        done = self._ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"in the page: {done['exceptionDetails']}")
        return done["result"].get("value")

    def picture(self, file: Path, *, whole: bool = True) -> None:
        """The page as PNG; the whole of it, or the window."""
        data = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()  # it ends when its pipe does
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()

    # -- the pipe -----------------------------------------------------------------------------------------------

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        asked: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            asked["sessionId"] = self._session
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\0")
        self._process.stdin.flush()
        answers: list[dict[str, Any]] = []

        def answered() -> bool:
            answers.extend(event for event in self._events if event.get("id") == number)
            return bool(answers)

        self._until(answered)
        self._events = [event for event in self._events if "id" not in event]
        if "error" in answers[0]:
            raise OSError(f"{method}: {answers[0]['error']}")
        result: dict[str, Any] = answers[0]["result"]
        return result

    def _until(self, is_so: Callable[[], bool]) -> None:
        assert self._process.stdout is not None
        until = time.monotonic() + _ANSWER_S
        while not is_so():
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser has not answered for {_ANSWER_S:.0f} s")
            received = os.read(self._process.stdout.fileno(), 1 << 16)
            if not received:
                raise OSError("the browser has ended")
            *messages, self._pending = (self._pending + received).split(b"\0")
            self._events += [json.loads(message) for message in messages]


def _complaint(event: dict[str, Any]) -> str:
    """An event as a sentence, where it is of something that should not be; else nothing."""
    method, about = event.get("method"), event.get("params", {})
    if method == "Runtime.exceptionThrown":
        details = about["exceptionDetails"]
        return f"exception: {details.get('exception', {}).get('description') or details['text']}"
    if method == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert", "warning"):
        said = " ".join(str(argument.get("value", argument.get("description"))) for argument in about["args"])
        return f"console: {said}"
    if method == "Log.entryAdded" and about["entry"]["level"] == "error":
        return f"log: {about['entry']['text']} {about['entry'].get('url', '')}"
    if method == "Network.requestWillBeSent":
        url = about["request"]["url"]
        return "" if url.startswith(("file:", "data:", "blob:", "about:")) else f"fetches {url}"
    return ""
