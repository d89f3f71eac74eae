"""Tests of the workers' synchronisation under the memory models of ARM and x86, and of the checker."""

import ast

import litmus
import pytest
from repository import ROOT
from weak_memory import ACQUIRE, MODELS, RELEASE, explore, load, store

OPERATIONS = set(litmus.ORDERS)


def calls(function: ast.AST) -> list[ast.Call]:
    """Calls by a plain name, in the order of the source."""
    found = (node for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


def operations(source: str) -> dict[str, list[tuple[str, str]]]:
    """{function: [(atomic operation, cell)]}, in the order of the source."""
    table = {}
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef):
            used = [call for call in calls(function) if ast.unparse(call.func) in OPERATIONS]
            table[function.name] = [(ast.unparse(call.func), ast.unparse(call.args[1])) for call in used]
    return {name: used for name, used in table.items() if used}


MODELLED = {name: [(operation, cell) for operation, cell, _ in used] for name, used in litmus.SOURCE.items()}
SYNC = (ROOT / "gemma_py/runtime/sync.py").read_text()


def test_the_model_has_the_operations_of_the_source() -> None:
    assert operations(SYNC) == MODELLED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    store_release(cells.watermarks, at, last)\n    return True", "    return True"),
        ("if load_acquire(cells.watermarks, at) != first", "if cells.watermarks[at] != first"),
        ("store_release(cells.shared, ARRIVED, 0)", "store_release(cells.shared, GENERATION, 0)"),
    ],
)
def test_a_changed_source_is_noticed(old: str, new: str) -> None:
    assert old in SYNC
    assert operations(SYNC.replace(old, new)) != MODELLED


def test_the_orders_are_those_of_the_source() -> None:
    tree = ast.parse((ROOT / "gemma_py/kernels/atomics.py").read_text())
    orders = {"acquire", "release", "acq_rel", "monotonic", "seq_cst"}
    found = {
        function.name: [
            node.value for node in ast.walk(function) if isinstance(node, ast.Constant) and node.value in orders
        ]
        for function in tree.body
        if isinstance(function, ast.FunctionDef) and function.name in OPERATIONS
    }
    assert found == litmus.ORDERS


def test_every_operation_of_the_source_has_a_mutation_or_a_reason() -> None:
    reasons = {litmus.FLAG, litmus.OWN, litmus.TEST, litmus.COUNT}
    named = {role for used in litmus.SOURCE.values() for _, _, role in used} - reasons
    mutated = {name.split(": ")[1].split(",")[0] for _, name in (*litmus.FOUND, *litmus.UNNEEDED)}
    assert named == mutated


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("test", "workers"), [(test, workers) for test in litmus.TESTS for workers in (2, 3)])
def test_the_protocol_has_no_bad_outcome(test: str, workers: int, model: str) -> None:
    bad, states = litmus.bad_outcomes(test, workers, model)
    assert bad == 0 and states > 5


@pytest.mark.parametrize("model", MODELS)
def test_four_workers_publish(model: str) -> None:
    assert litmus.bad_outcomes("publish", 4, model)[0] == 0


@pytest.mark.parametrize(("test", "name"), litmus.FOUND)
def test_a_weakened_order_is_found(test: str, name: str) -> None:
    assert litmus.bad_outcomes(test, 3, "ARM", mutation=name)[0] > 0
    assert litmus.bad_outcomes(test, 3, "x86", mutation=name)[0] == 0


@pytest.mark.parametrize(("test", "name"), litmus.UNNEEDED)
def test_an_order_is_stronger_than_needed(test: str, name: str) -> None:
    """If this test fails, the order has become necessary: move the pair to litmus.FOUND."""
    assert litmus.bad_outcomes(test, 3, "ARM", mutation=name)[0] == 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("test", "name"), litmus.DROPPED)
def test_a_dropped_wait_is_found(test: str, name: str, model: str) -> None:
    assert litmus.bad_outcomes(test, 3, model, wait=name)[0] > 0


# Well-known litmus tests: threads, an outcome, and the memory models that allow this outcome.
KNOWN = {
    "store buffering": (
        [[store("x", 1), load("y")], [store("y", 1), load("x")]],
        (0, 0),
        {"x86", "ARM"},
    ),
    "message passing": ([[store("x", 1), store("y", 1)], [load("y"), load("x")]], (1, 0), {"ARM"}),
    "message passing, acquire and release": (
        [[store("x", 1), store("y", 1, RELEASE)], [load("y", ACQUIRE), load("x")]],
        (1, 0),
        set(),
    ),
    "load buffering": ([[load("x"), store("y", 1)], [load("y"), store("x", 1)]], (1, 1), {"ARM"}),
    "coherence of loads": ([[store("x", 1)], [load("x"), load("x")]], (1, 0), set()),
    "coherence of a thread's own store": ([[store("x", 1), load("x")]], (0,), set()),
    "independent loads": (
        [[store("x", 1)], [store("y", 1)], [load("x"), load("y")], [load("y"), load("x")]],
        (1, 0, 1, 0),
        {"ARM"},
    ),
    "independent loads, acquire": (
        [[store("x", 1)], [store("y", 1)], [load("x", ACQUIRE), load("y")], [load("y", ACQUIRE), load("x")]],
        (1, 0, 1, 0),
        set(),
    ),
    "store buffering, acquire and release": (
        [[store("x", 1, RELEASE), load("y", ACQUIRE)], [store("y", 1, RELEASE), load("x", ACQUIRE)]],
        (0, 0),
        {"x86", "ARM"},
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_checker_decides_known_litmus_tests(name: str) -> None:
    threads, outcome, allowed = KNOWN[name]
    assert {model for model in MODELS if outcome in explore(threads, MODELS[model])[0]} == allowed
