import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serving import NO_END, wait_until

ROLES = ("user", "assistant")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
browsed = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver")


class Page:
    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self) -> "Page":
        self.driver.get(self.url)
        return self

    def reload(self) -> None:
        self.driver.refresh()
        # A page that knows the model's name sends no more requests by itself.
        self.wait(lambda: self.run("return model"))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText.trim())", selector)

    def send(self, text: str) -> None:
        self.find("#input").send_keys(text + "\n")

    def set(self, **options: Any) -> None:
        self.run("localStorage.setItem('gemma_py.options', JSON.stringify(arguments[0]))", options)
        self.reload()

    def without_end(self) -> None:
        """Forbid end tokens until the page is loaded again, because most answers would end within 200 tokens."""
        self.run(
            "const ask = window.fetch, bias = {logit_bias: arguments[0]};"
            "window.fetch = (url, o) => ask(url, o?.body ? {...o, body: JSON.stringify({...JSON.parse(o.body), ...bias})} : o)",
            NO_END,
        )

    def keep(self, *conversations: list[tuple[str, str]]) -> None:
        """Store conversations in the browser. Each is a list of (message, answer)."""
        made = []
        for number, said in enumerate(conversations):
            messages = [
                {"role": role, "content": text} for pair in said for role, text in zip(ROLES, pair, strict=True)
            ]
            made.append({"id": str(number), "title": said[0][0], "messages": messages})
        self.run("localStorage.setItem('gemma_py.conversations', JSON.stringify(arguments[0]))", made)
        self.reload()

    @contextlib.contextmanager
    def phone(self, width: int, height: int) -> Iterator[None]:
        """Emulate a phone, because a browser window cannot be so narrow and has no touch screen."""
        command = self.driver.execute_cdp_cmd
        try:
            self.resize(width, height)
            command("Emulation.setTouchEmulationEnabled", {"enabled": True})
            self.reload()
            yield
        finally:
            command("Emulation.setTouchEmulationEnabled", {"enabled": False})
            command("Emulation.clearDeviceMetricsOverride", {})
            self.reload()

    def resize(self, width: int, height: int) -> None:
        """Change the size of the emulated screen, as happens when a phone is turned or its keyboard opens."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.wait(lambda: self.run("return innerHeight") == height)

    def tap(self, selector: str) -> None:
        """Tap an element, once it has stopped moving and nothing covers it."""
        place = self.driver.execute_async_script(
            """
            const [selector, done] = arguments;
            let last = {};
            const look = () => {
              const e = document.querySelector(selector);
              e?.scrollIntoView({ block: "nearest" });
              const r = e?.getBoundingClientRect() ?? {}, at = { x: r.x + r.width / 2 || 0, y: r.y + r.height / 2 || 0 };
              if (at.x === last.x && at.y === last.y && e?.contains(document.elementFromPoint(at.x, at.y))) return done(at);
              last = at;
              requestAnimationFrame(look);
            };
            look();
            """,
            selector,
        )
        self.run("window.tapped = 0; addEventListener('click', () => tapped++, {once: true, capture: true})")
        for kind, points in (("touchStart", [place]), ("touchEnd", [])):
            self.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        self.wait(lambda: self.run("return tapped"))

    def keys(self, *keys: str) -> None:
        self.driver.switch_to.active_element.send_keys(*keys)

    @property
    def focused(self) -> str:
        """The focused element's name for screen readers."""
        return str(self.driver.switch_to.active_element.accessible_name)

    def wait(self, true: Callable[[], Any]) -> None:
        wait_until(lambda: bool(true()))

    def wait_for_answer(self) -> str:
        self.wait(lambda: self.all(".assistant:not([aria-busy]) [aria-label='Answer again']"))
        return self.texts(".assistant .text")[-1]
