"""The settings of a pass that only tests and diagnosis use, in one object; all of them are off in normal use."""

from dataclasses import dataclass

from gemma_py.runtime.fault_injection import FaultPlan
from gemma_py.runtime.profile import Profile
from gemma_py.runtime.trace import Trace


@dataclass
class Instruments:
    """fault_plan: delays, faults and omitted synchronisation, see fault_injection.py. poison: scratch and uncommitted KV rows are
    set to NaN before every pass, so that reading them shows in the results. profile: the times of every pass are added to it.
    traces: the trace of every pass is appended to it."""

    fault_plan: FaultPlan | None = None
    poison: bool = False
    profile: Profile | None = None
    traces: list[Trace] | None = None
