"""Explores the synchronisation of 2 workers with spin.

tools/check_protocol.py also explores 3 and 4 workers, which takes minutes.
"""

import protocol
import pytest

pytestmark = pytest.mark.skipif(bool(protocol.MISSING), reason=f"needs {' and '.join(protocol.MISSING)}")


@pytest.mark.parametrize("macros", protocol.SOUND)
def test_the_protocol_has_no_error(macros: str) -> None:
    error, states = protocol.check(2, macros)
    assert error == "" and states > 300


@pytest.mark.parametrize("mutation", protocol.MUTATIONS)
def test_a_mutation_is_found(mutation: str) -> None:
    assert protocol.check(2, f"{protocol.MUTATIONS[mutation]} {mutation}")[0] != ""
