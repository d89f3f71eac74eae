"""The synchronisation of 2 workers, explored by spin. Skipped if spin or a C compiler is not installed.

tools/check_protocol.py explores 3 and 4 workers too, which takes minutes.
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
