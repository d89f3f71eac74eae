"""What tests, benchmarks and diagnosis attach to a runner; a production run leaves all of it as it is."""

from dataclasses import dataclass

from gemma_py.runtime.profile import Profile
from gemma_py.runtime.trial import Trial


@dataclass
class Instruments:
    """Read before every pass. poison: fill scratch and uncommitted KV rows with NaN, so that reading them shows. trial: delays
    and faults on purpose. profile: gains the times of every pass."""

    poison: bool = False
    trial: Trial | None = None
    profile: Profile | None = None
