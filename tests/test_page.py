"""The chat page in a headless Chromium, against a real server. Skipped by name where there is no Chromium."""

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import NO_END, Running, idle, wait_until

from gemma_py.server.page import PAGE, POLICY

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium drives the browser")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
browsed = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver")

ATTACKS = (
    "<script>window.pwned=1</script>", "<img src=x onerror=window.pwned=1>", "[x](javascript:window.pwned=1)",
    "[x](data:text/html,<script>window.pwned=1</script>)", "![x](http://evil.example/leak.png)", "<iframe src=//evil.example>",
    "[x](JaVaScRiPt:alert(1) 'y')", "<svg onload=window.pwned=1>", "`<b>`**<i>x</i>**", "[a](http://e.example/\"onclick=alert(1))",
    "<javascript:alert(1)>", "| <b> |\n|---|\n| <script>window.pwned=1</script> |", "```html\n<script>window.pwned=1</script>\n```",
    "<style>*{display:none}</style>", "<base href=//evil.example>", "[" * 3000, "*" * 3000, "> " * 3000, "- " * 3000, "`" * 3001,
)  # fmt: skip


class Page:
    """What a person sees and does."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self) -> "Page":
        self.driver.get(self.url)
        return self

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
        """As the settings dialog keeps them."""
        self.run("localStorage.setItem('gemma_py.options', JSON.stringify(arguments[0]))", options)
        self.driver.refresh()

    def without_end(self) -> None:
        """Until the page is loaded again, only `max_tokens` or a person ends an answer: chance would end most in 200 tokens."""
        self.run(
            "const ask = window.fetch, bias = {logit_bias: arguments[0]};"
            "window.fetch = (url, o) => ask(url, o?.body ? {...o, body: JSON.stringify({...JSON.parse(o.body), ...bias})} : o)",
            NO_END,
        )

    def wait(self, true: Callable[[], Any]) -> None:
        wait_until(lambda: bool(true()))

    def wait_for_answer(self) -> str:
        self.wait(lambda: self.all(".assistant:not([aria-busy]) [aria-label='Answer again']"))
        return self.texts(".assistant .text")[-1]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1100,800",
    ):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield made
    made.quit()


@pytest.fixture
def page(driver: Any, server: Running) -> Iterator[Page]:
    made = Page(driver, server.url).open()
    made.run("localStorage.clear()")
    made.set(max_tokens=12, temperature=0)
    yield made
    assert made.run("return window.pwned") is None
    complaints = [entry["message"] for entry in driver.get_log("browser")]
    assert [text for text in complaints if "400" not in text] == []  # such as breaches of the Content-Security-Policy
    wait_until(lambda: idle(server))


@browsed
def test_a_conversation(page: Page, server: Running) -> None:
    page.send("What is a list?")
    first = page.wait_for_answer()
    _, want = server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "What is a list?"}], max_tokens=12, temperature=0
    )
    said = want["choices"][0]["message"]["content"]
    assert page.run("return find(current).messages[1].content") == said
    assert first.split() and re.search(r"12 tokens · [\d.]+ tok/s", page.texts(".stats")[-1])
    page.send("And a set?")
    page.wait(lambda: len(page.all(".assistant")) == 2)
    page.wait_for_answer()
    assert page.texts(".user .text") == ["What is a list?", "And a set?"]

    page.driver.refresh()  # all of it is still there
    assert page.texts(".user .text") == ["What is a list?", "And a set?"]
    assert page.texts(".assistant .text")[0] == first
    assert page.texts("#list .open") == ["What is a list?"]

    page.find("[aria-label='Answer again']").click()
    assert page.wait_for_answer() and len(page.all(".assistant")) == 2

    page.all("[aria-label='Edit and send again']")[0].click()
    area = page.find(".edit textarea")
    area.send_keys(" Now!\n")
    page.wait(lambda: len(page.all(".assistant")) == 1)
    page.wait_for_answer()
    assert page.texts(".user .text") == ["What is a list? Now!"]

    page.find("#new").click()
    assert page.all(".turn") == []
    page.send("Another one")
    page.wait_for_answer()
    assert page.texts("#list .open") == ["Another one", "What is a list? Now!"]


@browsed
def test_an_answer_is_seen_while_it_is_made_and_can_be_stopped(page: Page, server: Running) -> None:
    page.set(max_tokens=4000, temperature=1)
    page.without_end()
    page.send("Go on")
    page.wait(lambda: any(len(text) > 20 for text in page.texts(".assistant .text")))
    assert page.all(".assistant[aria-busy]") and not page.find("#send").is_displayed()
    page.find("#stop").click()
    wait_until(lambda: idle(server))
    page.wait(lambda: "stopped" in page.texts(".stats")[-1])
    kept = page.run("return find(current).messages[1].content")
    page.driver.refresh()
    assert page.run("return find(current).messages[1].content") == kept
    page.without_end()
    page.find("[aria-label='Answer again']").click()
    page.wait(lambda: page.all(".assistant[aria-busy]"))
    page.find("#input").send_keys("\ue00c")  # Escape
    wait_until(lambda: idle(server))


@browsed
def test_leaving_the_page_frees_the_place_and_keeps_what_was_said(page: Page, server: Running) -> None:
    page.set(max_tokens=4000, temperature=1)
    page.without_end()
    page.send("Go on")
    page.wait(lambda: any(len(text) > 20 for text in page.texts(".assistant .text")))
    page.driver.refresh()
    wait_until(lambda: idle(server))
    assert len(page.texts(".assistant .text")[0]) > 20 and "stopped" in page.texts(".stats")[-1]


@browsed
def test_nothing_that_a_model_says_is_executed(page: Page) -> None:
    conversation = {"id": "a", "title": ATTACKS[1], "messages": []}
    for attack in ATTACKS:
        conversation["messages"] += [{"role": "user", "content": attack}, {"role": "assistant", "content": attack}]  # type: ignore
    conversation["messages"][-1]["error"] = ATTACKS[0]  # type: ignore
    page.run("localStorage.setItem('gemma_py.conversations', JSON.stringify([arguments[0]]))", conversation)
    page.driver.refresh()
    assert len(page.all(".assistant")) == len(ATTACKS)
    assert page.all(":is(#log, #list) :is(script, img, iframe, style, base, object, embed, form, svg[onload])") == []
    assert (
        page.run(
            "return [...document.querySelectorAll('#log *')].filter(e => [...e.attributes].some(a => /^on/.test(a.name))).length"
        )
        == 0
    )
    links = page.run("return [...document.querySelectorAll('#log a')].map(a => [a.protocol, a.rel])")
    assert links and all(link == ["http:", "noopener noreferrer"] for link in links)
    for attack, text in list(zip(ATTACKS, page.texts(".user .text"), strict=True))[:8]:
        assert text == attack


SAMPLE = """# Lists
A **bold** and *slanted* `code` with [a link](https://example.org/x_y_z).
Second line

1. It can grow
2. It can `sort`
   - in place
   - or not
3. three

> quoted
> still

| call | what |
|---|--:|
| `append` | 2 \\| 3 |

```python
if x < 1:
    pass
```
---
2 * 3 * 4, snake_case_name, ~~gone~~"""


@browsed
def test_markdown(page: Page) -> None:
    script = "const d = document.createElement('div'); d.append(...markdown(arguments[0])); return d.innerHTML"
    made = re.sub(r"<button.*?</button>", "", page.run(script, SAMPLE))
    link = '<a href="https://example.org/x_y_z" target="_blank" rel="noopener noreferrer">a link</a>'
    assert made == (
        "<h1>Lists</h1>"
        f"<p>A <strong>bold</strong> and <em>slanted</em> <code>code</code> with {link}.<br>Second line</p>"
        '<ol start="1"><li>It can grow</li><li>It can <code>sort</code><ul><li>in place</li><li>or not</li></ul></li>'
        "<li>three</li></ol>"
        "<blockquote><p>quoted<br>still</p></blockquote>"
        '<div class="table"><table><thead><tr><th>call</th><th>what</th></tr></thead>'
        "<tbody><tr><td><code>append</code></td><td>2 | 3</td></tr></tbody></table></div>"
        "<pre><code>if x &lt; 1:\n    pass</code></pre><hr>"
        "<p>2 * 3 * 4, snake_case_name, <s>gone</s></p>"
    )


@browsed
def test_rendering_takes_time_in_proportion(page: Page) -> None:
    """A million characters of the worst kind, within the time that Selenium gives a script."""
    page.driver.set_script_timeout(30)
    for unit in ("*a", "[a](", "`a``", "_a ", "~~a", "**a*", "\\", "| a ", "> - "):
        page.run("markdown(arguments[0].repeat(2000)); markdown((arguments[0] + '\\n').repeat(2000))", unit)


@browsed
def test_a_refusal_is_shown(page: Page) -> None:
    page.set(max_tokens=4090)
    page.send("word " * 50)
    page.wait(lambda: page.texts(".failed"))
    assert "4096" in page.texts(".failed")[0]


@browsed
def test_settings_by_keyboard(page: Page) -> None:
    page.find("#settings").click()
    field = page.find("[name=system]")
    assert page.run("return document.activeElement === arguments[0]", field)
    field.send_keys("Be brief.")
    page.find("[name=seed]").send_keys("5\n")
    page.wait(lambda: not page.find("#dialog").is_displayed())
    assert page.run("return options") == {"system": "Be brief.", "seed": 5, "temperature": 0, "max_tokens": 12}
    page.find("#settings").click()
    page.find("[name=seed]").send_keys("\ue00c")  # Escape changes nothing
    assert page.run("return options.seed") == 5


@browsed
def test_a_narrow_screen(page: Page) -> None:
    page.driver.set_window_size(500, 800)  # the narrowest that a headless window can be
    try:
        page.send("word " * 30 + "x" * 300)
        page.wait_for_answer()
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
        assert not page.find("#side").is_displayed()
        page.find("#menu").click()
        page.wait(lambda: page.find("#side").is_displayed())
        page.find("#list .open").click()
        page.wait(lambda: not page.find("#side").is_displayed())
    finally:
        page.driver.set_window_size(1100, 800)


def test_the_policy_names_what_the_page_runs_and_nothing_else(server: Running) -> None:
    status, text, headers = server.request("GET", "/")
    assert (status, text, headers["Content-Security-Policy"]) == (200, PAGE, POLICY)
    assert "default-src 'none'" in POLICY and "unsafe" not in POLICY
    assert not re.search(r"""(?:src|href)=["'](?!data:,)""", PAGE.partition("<script>")[0])  # no outside assets
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bstyle=", PAGE)


@browsed
@pytest.mark.skipif("GEMMA_PY_SCREENSHOTS" not in os.environ, reason="GEMMA_PY_SCREENSHOTS names no directory")
def test_screenshots(page: Page) -> None:
    """For eyes."""
    folder = Path(os.environ["GEMMA_PY_SCREENSHOTS"])
    said = {"role": "assistant", "content": SAMPLE, "stats": "74 tokens · 58.3 tok/s"}
    stopped = {"role": "assistant", "content": "A set holds each value", "stopped": True}
    asked = [{"role": "user", "content": text} for text in ("What is a list in Python?", "And a set?")]
    conversations = [
        {"id": "a", "title": asked[0]["content"], "messages": [asked[0], said, asked[1], stopped]},
        {"id": "b", "title": "Write a short poem about the sea, and then another one", "messages": asked[:1]},
    ]
    page.run("localStorage.setItem('gemma_py.conversations', JSON.stringify(arguments[0]))", conversations)
    folder.mkdir(parents=True, exist_ok=True)
    for theme, (name, *size) in itertools.product(("light", "dark"), (("wide", 1200, 850), ("narrow", 500, 850))):
        page.driver.set_window_size(*size)
        page.set(max_tokens=40, temperature=0, theme=theme)
        page.driver.save_screenshot(str(folder / f"{name}-{theme}.png"))
    page.run("openSettings()")
    page.driver.save_screenshot(str(folder / "settings.png"))
    page.driver.set_window_size(1100, 800)
