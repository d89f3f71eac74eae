import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import receipt_tampering as tampering
from browser import Page, browsed
from serving import Running, serving

import gemma_py
from gemma_py.receipts.receipt import Receipt
from gemma_py.server.audits import MOST_RECEIPTS
from gemma_py.server.web_ui import AUDIT_PAGE, AUDIT_POLICY

TEXT = {"temperature": 1.0, "seed": 3, "logit_bias": tampering.NO_END}


@pytest.fixture(scope="module")
def receipt(tiny_engine: gemma_py.Engine) -> Receipt:
    return tampering.made(tiny_engine, "The list of", 20, **TEXT)


def events(server: Running, body: bytes) -> list[dict[str, Any]]:
    status, text, headers = server.request("POST", "/v1/audit", body)
    assert status == 200 and headers.get_content_type() == "application/x-ndjson"
    return [json.loads(line) for line in text.splitlines()]


def test_the_route_streams_what_it_finds(server: Running, receipt: Receipt) -> None:
    begun, *middle, last = events(server, receipt.to_bytes())
    assert begun["type"] == "receipt" and "".join(begun["pieces"]) and len(begun["pieces"]) == 20
    assert sum(event["count"] for event in middle) == 20
    assert (last["type"], last["verdict"], last["stage"], last["tokens"]) == ("verdict", "equal", None, 20)
    wrong = tampering.dataclasses.replace(
        receipt, logits=tampering.with_entry(receipt.logits, 7, tampering.with_bit(receipt.logits[7]))
    )
    both = json.dumps({"receipts": [wrong.document(), {}, receipt.document()]}).encode()
    found = events(server, both)
    verdicts = {event["receipt"]: event for event in found if event["type"] == "verdict"}
    assert [(verdicts[n]["verdict"], verdicts[n]["stage"], verdicts[n]["token"]) for n in range(3)] == [
        ("diverged", "logits", 7), ("diverged", "structure", None), ("equal", None, None),
    ]  # fmt: skip


@pytest.mark.parametrize("body", [b"", b"{}", b"[" * 100_000, b'{"a":1,"a":1}', b"\xff", b"null"])
def test_hostile_bodies_are_answered(server: Running, body: bytes) -> None:
    found = events(server, body)
    assert found[-1]["verdict"] == "diverged" and found[-1]["stage"] == "structure" and len(found[-1]["message"]) < 300


def test_too_many_receipts_are_refused(server: Running, receipt: Receipt) -> None:
    body = json.dumps({"receipts": [receipt.document()] * (MOST_RECEIPTS + 1)}).encode()
    (found,) = events(server, body)
    assert found["type"] == "error" and str(MOST_RECEIPTS) in found["message"]


def test_an_audit_needs_the_key_and_the_page_does_not(tiny_engine: gemma_py.Engine, receipt: Receipt) -> None:
    with serving(tiny_engine, keys=["a-key-of-16-characters"]) as server:
        assert server.request("POST", "/v1/audit", receipt.to_bytes())[0] == 401
        status, page, headers = server.request("GET", "/audit")
        assert status == 200 and page == AUDIT_PAGE and headers["Content-Security-Policy"] == AUDIT_POLICY


def test_the_page_loads_nothing_from_elsewhere() -> None:
    names = AUDIT_PAGE.replace("http://www.w3.org/2000/svg", "")  # SVG's namespace, which no browser loads
    assert re.findall(r"https?:|//[a-z]+\.|\bsrc=|@import|url\(", names) == []
    assert "default-src 'none'" in AUDIT_POLICY and "unsafe" not in AUDIT_POLICY and "{{" not in AUDIT_PAGE


@pytest.fixture
def page(driver: Any, server: Running) -> Iterator[Page]:
    made = Page(driver, f"{server.url}/audit").open()
    yield made
    assert [entry["message"] for entry in driver.get_log("browser")] == []


def choose(page: Page, path: Path) -> None:
    page.find("#file").send_keys(str(path))
    page.wait(lambda: page.texts("#note") != [""] and not page.texts("#note")[0].startswith("checking"))


@browsed
def test_a_receipt_is_checked_token_by_token(page: Page, receipt: Receipt, tmp_path: Path) -> None:
    choose(page, tampering.write(tmp_path / "good.json", receipt.to_bytes()))
    assert page.texts("#note") == ["done"]
    assert page.texts(".verdict") == [f"equal: 20 tokens after a prompt of {len(receipt.prompt)}"]
    assert len(page.all(".tokens span.held")) == 20 and page.all(".broke") == []
    assert len(page.all(".stages li.held")) == 8 and page.texts(".stages li")[0] == "not signed"


@browsed
def test_the_first_difference_is_shown(page: Page, receipt: Receipt, tmp_path: Path) -> None:
    wrong = tampering.dataclasses.replace(
        receipt, logits=tampering.with_entry(receipt.logits, 7, tampering.with_bit(receipt.logits[7]))
    )
    choose(page, tampering.write(tmp_path / "wrong.json", wrong.to_bytes()))
    assert page.texts(".verdict")[0].startswith(f"logits at token 7 (position {len(receipt.prompt) + 7})")
    assert page.run("return [...document.querySelectorAll('.tokens span')].findIndex(e => e.matches('.broke'))") == 7
    assert page.texts(".stages li.broke") == ["logits"]
    assert page.texts(".stages li.held") == ["structure", "model", "text", "sampling"]
    newer = tampering.dataclasses.replace(receipt, rules=receipt.rules + 1)
    choose(page, tampering.write(tmp_path / "newer.json", newer.to_bytes()))
    assert page.texts(".verdict")[0].startswith("cannot tell: model: ") and page.texts(".stages li.held") == [
        "structure"
    ]
    choose(page, tampering.write(tmp_path / "broken.json", b"{}"))
    assert "neither a receipt" in page.texts(".verdict")[0] and page.texts(".stages li.broke") == ["structure"]


@browsed
def test_a_dropped_file_is_checked(page: Page, receipt: Receipt) -> None:
    page.run(
        "const data = new DataTransfer(); data.items.add(new File([arguments[0]], '<b>a.json'));"
        "dispatchEvent(new DragEvent('drop', {dataTransfer: data, cancelable: true}))",
        receipt.to_bytes().decode(),
    )
    page.wait(lambda: page.texts("#note") == ["done"])
    assert page.texts("h2") == ["<b>a.json"] and page.texts(".verdict")[0].startswith("equal")
