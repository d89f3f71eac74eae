"""Runs the model checker spin on protocol.pml."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

MODEL = Path(__file__).with_name("protocol.pml")
MISSING = [name for name in ("spin", "cc") if shutil.which(name) is None]  # programs that the checker needs

# Macros of the cases in which spin must find no error.
SOUND = [
    "",
    "BARRIERS",
    "FAULT_FAIL",
    "BARRIERS FAULT_FAIL",
    "FAULT_STALL",
    "BARRIERS FAULT_STALL",
    "WATCH",
    "WATCH LEAVE",
]
# Cases whose state space fits into 6 GB with 4 workers.
SOUND_WITH_4 = ["BARRIERS", "BARRIERS FAULT_FAIL", "WATCH LEAVE"]
# mutation -> the case in which two workers expose it
MUTATIONS = {
    "M_NO_BARRIER_WAIT": "BARRIERS",
    "M_GENERATION_AFTER_ARRIVAL": "BARRIERS",
    "M_RESET_AFTER_GENERATION": "BARRIERS",
    "M_ARRIVAL_NOT_ATOMIC": "BARRIERS",
    "M_CLAIM_NOT_ATOMIC": "",
    "M_CLAIM_DESCENDING": "",
    "M_NO_PUBLISH_WAIT": "",
    "M_PUBLISH_BEFORE_WRITE": "",
    "M_NO_AWAIT": "",
    "M_FAIL_NOT_ATOMIC": "BARRIERS FAULT_FAIL",
    "M_WAIT_IGNORES_BROKEN": "BARRIERS FAULT_FAIL",
    "M_STALL_NOT_REPORTED": "BARRIERS FAULT_STALL",
    "M_WAITING_ALONE_IS_DEADLOCK": "WATCH",
    "M_ONE_QUIET_TICK": "WATCH",
}


def check(workers: int, macros: str) -> tuple[str, int]:
    """Return spin's first error ("" if none) and the number of explored states. Raise if the search is incomplete."""
    with tempfile.TemporaryDirectory() as folder:

        def call(*command: str) -> str:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{command[0]} failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")
            return done.stdout

        call("spin", "-a", f"-DN={workers}", *(f"-D{macro}" for macro in macros.split()), str(MODEL))
        call("cc", "-O2", "-DSAFETY", "-DMEMLIM=6000", "-o", "pan", "pan.c")
        out = call("./pan", "-m1000000")
    found = re.search(r"^pan:\d+: (.*) \(at depth", out, re.MULTILINE)
    states = re.search(r"(\d+) states, stored", out)
    complete = "errors: 0" in out and "Search not completed" not in out and "max search depth too small" not in out
    if states is None or not (found or complete):
        raise RuntimeError(f"spin's search of {macros or 'the protocol'} is incomplete: {out[-2000:]}")
    return (found.group(1) if found else ""), int(states.group(1))
