"""Check the synchronisation of the workers: python tools/check_protocol.py [WORKERS]

Prints the states and the verdict of every case and mutation, for 2 up to WORKERS workers (default 3, at most 4).
tests/model/weak_memory.py checks under the memory models of ARM and x86. spin, if installed, checks under sequential
consistency. The exit code is 1 if a verdict is wrong.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests" / "model"))
import litmus
import protocol


def main(workers: int) -> int:
    wrong = 0

    def report(name: str, states: int, found: str, expected: bool) -> None:
        nonlocal wrong
        wrong += bool(found) != expected
        verdict = f"found: {found}" if found else "no bad outcome"
        print(f"{name:<64} {states:>10,} states  {verdict}{'' if bool(found) == expected else '  WRONG'}", flush=True)

    for test, model in ((test, model) for test in litmus.TESTS for model in litmus.MODELS):
        for count in range(2, workers + 1):
            bad, states = litmus.bad_outcomes(test, count, model)
            report(f"{model}: {test}, {count} workers", states, f"{bad} outcomes" if bad else "", False)
    for mutations, expected in ((litmus.FOUND, True), (litmus.UNNEEDED, False)):
        for test, name in mutations:
            bad, states = litmus.bad_outcomes(test, 3, "ARM", mutation=name)
            report(f"ARM: {name} is plain", states, f"{bad} outcomes" if bad else "", expected)
    for test, name in litmus.DROPPED:
        for model in litmus.MODELS:
            bad, states = litmus.bad_outcomes(test, 3, model, wait=name)
            report(f"{model}: {name} is dropped", states, f"{bad} outcomes" if bad else "", True)
    if protocol.MISSING:
        print(f"skipped: spin's model, because {' and '.join(protocol.MISSING)} is missing (apt-get install spin gcc)")
        return int(wrong > 0)
    for count in range(2, workers + 1):
        for macros in protocol.SOUND if count < 4 else protocol.SOUND_WITH_4:
            error, states = protocol.check(count, macros)
            report(f"spin: {count} workers {macros}", states, error, False)
    for mutation, macros in protocol.MUTATIONS.items():
        error, states = protocol.check(2, f"{macros} {mutation}")
        report(f"spin: 2 workers {macros} {mutation}", states, error, True)
    return int(wrong > 0)


if __name__ == "__main__":
    if not (sys.argv[1:] == [] or sys.argv[1:] in (["2"], ["3"], ["4"])):
        sys.exit(__doc__)
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 3))
