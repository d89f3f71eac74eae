"""What only tests and diagnosis ask of a pass, on one object; all of it is off in normal use."""

from dataclasses import dataclass

from gemma_py.runtime.profile import Profile
from gemma_py.runtime.trace import Trace
from gemma_py.runtime.trial import Trial


@dataclass
class Instruments:
    """trial: delays, faults and missing synchronisation, see trial.py. poison: scratch and uncommitted KV rows are NaN
    before every pass, so that reading them shows. profile: gains the times of every pass. traces: gains the trace of
    every pass."""

    trial: Trial | None = None
    poison: bool = False
    profile: Profile | None = None
    traces: list[Trace] | None = None
