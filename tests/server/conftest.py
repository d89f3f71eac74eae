"""Shared by the tests of the server: one that runs in this process."""

from collections.abc import Iterator

import pytest
from serving import Running, serving

import gemma_py


@pytest.fixture(scope="session")
def server(tiny_engine: gemma_py.Engine) -> Iterator[Running]:
    """One for all tests that leave it as it was."""
    with serving(tiny_engine) as running:
        yield running
