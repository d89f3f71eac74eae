import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gemma4_model
import pytest
from browser import Page, browsed
from serving import Running, idle, serving, wait_until

from gemma_py.generate.core import Generation
from gemma_py.server.web_ui import PAGE, POLICY

ATTACKS = (
    "<script>window.pwned=1</script>", "<img src=x onerror=window.pwned=1>", "[x](javascript:window.pwned=1)",
    "[x](data:text/html,<script>window.pwned=1</script>)", "![x](http://evil.example/leak.png)", "<iframe src=//evil.example>",
    "[x](JaVaScRiPt:alert(1) 'y')", "<svg onload=window.pwned=1>", "`<b>`**<i>x</i>**", "[a](http://e.example/\"onclick=alert(1))",
    "<javascript:alert(1)>", "| <b> |\n|---|\n| <script>window.pwned=1</script> |", "```html\n<script>window.pwned=1</script>\n```",
    "<style>*{display:none}</style>", "<base href=//evil.example>", "[" * 3000, "*" * 3000, "> " * 3000, "- " * 3000, "`" * 3001,
)  # fmt: skip
TAB, ENTER, ESCAPE, SHIFT, CONTROL = "\ue004", "\ue007", "\ue00c", "\ue008", "\ue009"
LONG = f"""{"Donaudampfschiffahrt" * 9} https://example.org/{"a/long/path/" * 9}

| name | what it does when it is called | returns | raises |
|---|---|---|---|
| `append` | puts a value at the end of the list, in place | nothing | nothing |

```
def a_function_with_a_long_name(first_argument, second_argument): return first_argument + second_argument
```
> 1. `{"code_without_breaks_" * 9}`
>    - deeper
>      - and deeper still, with words enough for two lines
"""


@pytest.fixture
def page(driver: Any, server: Running) -> Iterator[Page]:
    made = Page(driver, server.url).open()
    made.run("localStorage.clear()")
    made.set(max_tokens=12, temperature=0)
    yield made
    assert made.run("return window.pwned") is None
    complaints = [entry["message"] for entry in driver.get_log("browser")]
    # The browser has logged nothing else, such as a violation of the Content-Security-Policy.
    assert [text for text in complaints if "status of 400" not in text] == []
    wait_until(lambda: idle(server))


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow tokens down, so that no answer ends before a test stops it."""
    choose = Generation.next

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.008)
        return choose(*arguments)

    monkeypatch.setattr(Generation, "next", slowly)


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

    page.reload()
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
@pytest.mark.usefixtures("unhurried")
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
    page.reload()
    assert page.run("return find(current).messages[1].content") == kept
    page.without_end()
    page.find("[aria-label='Answer again']").click()
    page.wait(lambda: page.all(".assistant[aria-busy]"))
    page.find("#input").send_keys("\ue00c")
    wait_until(lambda: idle(server))


@browsed
def test_thoughts_are_shown_apart_and_not_sent_back(driver: Any, tmp_path: Path) -> None:
    folder = gemma4_model.write_checkpoint(tmp_path / "checkpoint")
    with gemma4_model.load(folder) as engine, serving(engine) as thinker:
        page = Page(driver, thinker.url).open()
        page.run("localStorage.clear()")
        page.set(max_tokens=60, reasoning_effort="high")
        tokenizer = engine.text_tokenizer()
        thought = ("<|channel>", "thought\n<b>Hm</b>", "<channel|>")
        with gemma4_model.scripted(gemma4_model.answer_ids(tokenizer, *thought, "It is.", "<turn|>")):
            page.send("Is it?")
            page.wait_for_answer()
            assert page.texts(".assistant .thoughts summary") == ["Thoughts"]
            shown = page.run("return document.querySelector('.assistant .thoughts p').textContent")
            assert shown == page.run("return find(current).messages[1].thoughts") == "<b>Hm</b>"
            assert page.run("return find(current).messages[1].content") == "It is."
            page.run("window.bodies = []; const real = window.fetch; window.fetch = (at, given) => "
                     "{ if (given?.body) window.bodies.push(given.body); return real(at, given); }")  # fmt: skip
            page.send("Sure?")
            page.wait(lambda: len(page.all(".assistant")) == 2)
            page.wait_for_answer()
        (body,) = page.run("return window.bodies")
        assert "Hm" not in body and "It is." in body and '"reasoning_effort":"high"' in body
        wait_until(lambda: idle(thinker))


@browsed
@pytest.mark.usefixtures("unhurried")
def test_leaving_the_page_cancels_the_request_and_keeps_the_text(page: Page, server: Running) -> None:
    page.set(max_tokens=4000, temperature=1)
    page.without_end()
    page.send("Go on")
    page.wait(lambda: any(len(text) > 20 for text in page.texts(".assistant .text")))
    page.reload()
    wait_until(lambda: idle(server))
    assert len(page.texts(".assistant .text")[0]) > 20 and "stopped" in page.texts(".stats")[-1]


@browsed
def test_nothing_that_a_model_says_is_executed(page: Page) -> None:
    conversation = {"id": "a", "title": ATTACKS[1], "messages": []}
    for attack in ATTACKS:
        conversation["messages"] += [{"role": "user", "content": attack}, {"role": "assistant", "content": attack}]  # type: ignore
    conversation["messages"][-1]["error"] = ATTACKS[0]  # type: ignore
    page.run("localStorage.setItem('gemma_py.conversations', JSON.stringify([arguments[0]]))", conversation)
    page.reload()
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
        '<div class="code"><pre><code>if x &lt; 1:\n    pass</code></pre></div><hr>'
        "<p>2 * 3 * 4, snake_case_name, <s>gone</s></p>"
    )


@browsed
def test_the_time_to_render_is_proportional_to_the_length(page: Page) -> None:
    """The most difficult texts are rendered within Selenium's time limit for a script."""
    page.driver.set_script_timeout(30)
    for unit in ("*a", "[a](", "`a``", "_a ", "~~a", "**a*", "\\", "| a ", "> - "):
        page.run("markdown(arguments[0].repeat(2000)); markdown((arguments[0] + '\\n').repeat(2000))", unit)
    page.run("markdown('[a]('.repeat(16000))")


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
    page.find("[name=seed]").send_keys("\ue00c")  # Escape discards the change
    assert page.run("return options.seed") == 5


BEYOND = """  // what is seen of it reaches over the edge of the screen, and cannot be scrolled to
const scrolled = e => e && (e.matches(".table, pre") && getComputedStyle(e).overflowX === "auto" || scrolled(e.parentElement));
return [...document.querySelectorAll("main *, dialog *, dialog")].filter(e => {
  const { left, right, width } = e.getBoundingClientRect();
  return width && !scrolled(e.parentElement) && (left < 0 || right > innerWidth + .5);
}).map(e => e.outerHTML.slice(0, 80))"""
SMALL = """  // for a finger
return [...document.querySelectorAll("button, dialog :is(input, select)")].filter(e => {
  const { width, height } = e.getBoundingClientRect();
  return e.checkVisibility({ visibilityProperty: true }) && Math.min(width, height) < 43.9;
}).map(e => e.outerHTML.slice(0, 80))"""


@browsed
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(("width", "height"), [(360, 640), (320, 568)])
def test_a_narrow_screen(page: Page, server: Running, width: int, height: int) -> None:
    page.keep([("x" * 300 + " word" * 30, LONG)], [(attack, attack) for attack in ATTACKS])

    def fits() -> None:
        assert page.run("return document.documentElement.scrollWidth") == width
        assert page.run(BEYOND) == [] and page.run(SMALL) == []

    with page.phone(width, height):
        fits()
        # Words of table headings are not broken into letters.
        assert page.run("return document.querySelector('th').clientHeight") < 60
        assert not page.find("#side").is_displayed()
        page.tap("#menu")
        assert page.focused.startswith("xxx")
        page.keys(ESCAPE)
        assert page.focused == "Conversations"
        page.tap("#menu")
        page.keys(TAB * 4)
        page.wait(lambda: not page.find("#side").is_displayed())
        page.tap("#menu")
        page.tap("#list li:last-child .open")
        page.wait(lambda: not page.find("#side").is_displayed())
        assert page.texts("#title") == [ATTACKS[0]]
        assert page.focused == "Conversation"
        fits()
        page.tap("#menu")
        page.wait(lambda: page.run("return document.querySelector('#side').getBoundingClientRect().left") == 0)
        fits()
        page.tap("#new")
        assert page.all(".turn") == []

        page.tap("#settings")
        assert page.focused == "Settings"
        fits()
        page.resize(width, 300)
        saves = page.run(
            "const r = document.querySelector('[value=save]').getBoundingClientRect(); return [r.top, r.bottom]"
        )
        assert saves[0] > 0 and saves[1] < 300
        page.resize(width, height)
        page.tap("#cancel")
        page.wait(lambda: not page.find("#dialog").is_displayed())

        page.tap("#input")
        page.keys("one", ENTER, "two")  # Enter makes a new line, because phones have no Shift key
        page.tap("#send")
        page.wait_for_answer()
        assert page.texts(".user .text") == ["one\ntwo"] and page.focused == "Conversation"
        page.tap(".assistant [aria-label='Answer again']")
        page.wait_for_answer()
        page.tap("[aria-label='Edit and send again']")
        page.keys(" three " + "word " * 50)
        fits()
        page.tap(".edit .plain")
        page.wait_for_answer()
        assert "three word" in page.texts(".user .text")[0]
        page.set(max_tokens=3900, temperature=1)
        page.without_end()
        page.tap("[aria-label='Answer again']")
        page.wait(lambda: len(page.texts(".assistant .text")[-1]) > 20)
        page.tap("#input")
        page.resize(width, 320)
        page.wait(lambda: page.run("return log.scrollHeight - log.scrollTop - log.clientHeight < 60"))
        assert page.run("return input.getBoundingClientRect().bottom") < 320
        page.tap("#stop")
        wait_until(lambda: idle(server))
        page.wait(lambda: "stopped" in page.texts(".stats")[-1])
        fits()


@browsed
@pytest.mark.usefixtures("unhurried")
def test_by_keyboard_alone(page: Page, server: Running) -> None:
    page.keep([("What is a list?", "```\n[1]\n```")])
    chat = ["Edit and send again", "Copy", "Copy", "Copy", "Answer again", "Message", "Send"]
    order = ["New conversation", "What is a list?", "Delete this conversation", "Settings", *chat]
    assert page.focused == "Message"
    for name in reversed(order[:-2]):
        page.keys(SHIFT, TAB)
        assert page.focused == name
    for name in order[1:]:
        page.keys(TAB)
        assert page.focused == name
    assert all(button.accessible_name for button in page.all("button") if button.is_displayed())

    for back, name in ((5, "Edit and send again"), (6, "Settings"), (1, "Answer again")):
        page.find("#input").click()
        page.keys(SHIFT, TAB * back)
        assert page.focused == name
        page.keys(ENTER)
        if name == "Answer again":
            page.wait_for_answer()
            assert page.focused == "Message"
        else:
            assert page.focused == ("System message" if name == "Settings" else "Edit the message")
            page.keys(ESCAPE)
            page.wait(lambda: page.focused == name)  # noqa: B023  (called at once)

    page.set(max_tokens=4000, temperature=1)
    page.without_end()
    page.keys("Go on", ENTER)
    page.wait(lambda: page.texts(".assistant .text")[-1])
    page.keys("no")
    page.keys(ENTER)
    assert page.texts("#note") == ["An answer is being generated: stop it first."]
    page.keys(TAB)
    assert page.focused == "Stop"
    page.keys(ENTER)
    wait_until(lambda: idle(server))
    page.wait(lambda: page.focused == "Message" and page.texts("#note") == ["Stopped."])


@browsed
@pytest.mark.parametrize("secure", [True, False], ids=["secure", "from another machine"])
def test_copying(page: Page, secure: bool) -> None:
    page.keep([("What is a list?", "```\n[1]\n```")])
    if not secure:  # browsers give no clipboard access over plain HTTP
        page.run("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    for selector, text in ((".code button", "[1]"), (".user [aria-label='Copy']", "What is a list?")):
        page.find(selector).click()
        assert page.focused == "Copy"
        page.wait(lambda: page.find(selector).find_elements("css selector", "path[d^='M5 13']"))  # noqa: B023
        page.find("#input").clear()
        page.find("#input").send_keys(CONTROL + "v")
        assert page.run("return input.value") == text


CONTRAST = r"""
const rgba = text => { const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number); return [r, g, b, a]; };
const over = ([r, g, b, a], under) => [r, g, b].map((v, n) => v * a + under[n] * (1 - a));
const ground = e => { const own = rgba(getComputedStyle(e).backgroundColor);
  return own[3] === 1 || !e.parentElement ? own : over(own, ground(e.parentElement)); };
const opacity = e => e ? Number(getComputedStyle(e).opacity) * opacity(e.parentElement) : 1;
const light = colour => { const [r, g, b] = colour.map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b; };
const ratio = (e, colour) => { const under = ground(e), [r, g, b, a] = rgba(colour);
  const [x, y] = [light(over([r, g, b, a * opacity(e)], under)), light(under)];
  return (Math.max(x, y) + .05) / (Math.min(x, y) + .05); };
const made = [];
for (const e of document.querySelectorAll("body *")) {
  if (!e.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
  const style = getComputedStyle(e), name = `${e.tagName} ${e.id} ${(e.title || e.textContent).trim().slice(0, 20)}`;
  if (e.tagName === "svg") made.push([ratio(e, style.color) / 3, name]);
  else if (e.value || [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) made.push([ratio(e, style.color) / 4.5, name]);
  if (e.placeholder && !e.value) made.push([ratio(e, getComputedStyle(e, "::placeholder").color) / 4.5, "placeholder " + name]);
  if (e.matches("input, select, .box, dialog textarea, .plain"))
    made.push([ratio(e.parentElement, style.borderColor) / 3, "edge " + name]);
}
return made"""


@browsed
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_meets_wcag_aa(page: Page, theme: str) -> None:
    """Text needs a contrast of 4.5 to 1. Icons and edges of fields need 3 to 1."""
    page.set(theme=theme)
    page.keep([("What is a list?", SAMPLE), ("And a set?", "")], [("Hello", "")])
    page.run("say('Hello.'); find(current).messages[3].error = 'It failed.'; show()")
    page.find("[aria-label='Edit and send again']").click()
    seen = page.run(CONTRAST)
    page.find("#settings").click()
    seen += page.run(CONTRAST)
    assert len(seen) > 100 and [name for share, name in seen if share < 1] == []


def test_the_policy_names_what_the_page_runs_and_nothing_else(server: Running) -> None:
    status, text, headers = server.request("GET", "/")
    assert (status, text, headers["Content-Security-Policy"]) == (200, PAGE, POLICY)
    assert "default-src 'none'" in POLICY and "unsafe" not in POLICY
    assert not re.search(r"""(?:src|href)=["'](?!data:,)""", PAGE.partition("<script>")[0])
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bstyle=", PAGE)


@browsed
@pytest.mark.skipif("GEMMA_PY_SCREENSHOTS" not in os.environ, reason="GEMMA_PY_SCREENSHOTS names no directory")
def test_screenshots(page: Page) -> None:
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

    def shoot(name: str) -> None:
        page.driver.save_screenshot(str(folder / f"{name}.png"))

    for theme, (name, *size) in itertools.product(
        ("light", "dark"), (("wide", 1100, 800), ("small", 360, 640), ("tiny", 320, 568))
    ):
        page.set(max_tokens=40, temperature=0, theme=theme)
        with contextlib.nullcontext() if name == "wide" else page.phone(*size):
            shoot(f"{name}-{theme}")
            page.run("log.scrollTop = 0; setMenu(true)")
            shoot(f"{name}-{theme}-menu")
            page.run("choose('b'); openSettings()")
            shoot(f"{name}-{theme}-settings")
