from collections.abc import Iterator
from typing import Any

import pytest
from browser import CHROMIUM, DRIVER
from serving import Running, serving

import gemma_py


@pytest.fixture(scope="session")
def server(tiny_engine: gemma_py.Engine) -> Iterator[Running]:
    with serving(tiny_engine) as running:
        yield running


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
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
