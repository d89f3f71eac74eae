"""Settings of a forward pass that only tests and diagnosis use. They are off by default."""

from dataclasses import dataclass

from gemma_py.runtime.fault_injection import FaultPlan
from gemma_py.runtime.profile import Profile
from gemma_py.runtime.trace import Trace


@dataclass
class Instruments:
    """Settings for tests and diagnosis.

    fault_plan: the faults to inject, see fault_injection.py.
    poison: whether to fill scratch memory and unused KV rows with NaN before every pass, so that a read of stale data
    shows.
    profile: an object that sums up the times of every pass.
    traces: a list to which the trace of every pass is appended.
    """

    fault_plan: FaultPlan | None = None
    poison: bool = False
    profile: Profile | None = None
    traces: list[Trace] | None = None
