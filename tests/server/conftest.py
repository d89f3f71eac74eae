"""The fixture of the server's tests: a server in this process."""

from collections.abc import Iterator

import pytest
from serving import Running, serving

import gemma_py


@pytest.fixture(scope="session")
def server(tiny_engine: gemma_py.Engine) -> Iterator[Running]:
    """A server for all tests that do not change its settings."""
    with serving(tiny_engine) as running:
        yield running
