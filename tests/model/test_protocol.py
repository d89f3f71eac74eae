"""The synchronisation of the workers, explored by spin. Skipped if spin or a C compiler is not installed."""

import protocol
import pytest

pytestmark = pytest.mark.skipif(bool(protocol.MISSING), reason=f"needs {' and '.join(protocol.MISSING)}")


@pytest.mark.parametrize("macros", protocol.SOUND)
@pytest.mark.parametrize("workers", [2, 3])
def test_the_protocol_has_no_error(workers: int, macros: str) -> None:
    error, states = protocol.check(workers, macros)
    assert error == "" and states > 300


@pytest.mark.parametrize("macros", protocol.SOUND_WITH_4)
def test_four_workers_have_no_error(macros: str) -> None:
    assert protocol.check(4, macros)[0] == ""


@pytest.mark.parametrize("mutation", protocol.MUTATIONS)
def test_a_mutation_is_found(mutation: str) -> None:
    assert protocol.check(2, f"{protocol.MUTATIONS[mutation]} {mutation}")[0] != ""
