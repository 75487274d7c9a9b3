"""One Mac of a model's fleet: what it is, how fast, and in which state."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.routing.correction import SpeedCorrection
from cluster.routing.drift import DriftBook
from cluster.routing.index import PrefixIndex
from cluster.routing.mac import MacInfo, MacState
from cluster.routing.speed import StepCosts, StepModel


@dataclass(slots=True)
class Member:
    """One Mac in its slot."""

    info: MacInfo
    slot: int
    speed: StepModel
    drift: DriftBook
    correction: SpeedCorrection
    is_lost: bool = False
    # When the router first looked at its clock after the loss.
    lost_since_s: float | None = None
    is_draining: bool = False
    is_cordoned: bool = False
    note: str = ""
    # Requests that it runs beyond those booked here: a restarted router doesn't know its bookings.
    num_foreign: int = 0
    # Digests of the adapters that requests may use there.
    adapters: frozenset[str] = frozenset()

    # What it has not learnt yet is as with the fleet's other Macs.
    shape: Sequence[float] | None = None
    # As its reports say, corrected by how long its first tokens took; see `update_costs`.
    costs: StepCosts = field(init=False)

    def __post_init__(self) -> None:
        self.update_costs()

    def update_costs(self) -> None:
        """To be called when speed, shape or correction have changed."""
        costs = self.speed.costs if self.shape is None else self.speed.costs_in(self.shape)
        self.costs = costs.times(self.correction.factor)

    def state(self, index: PrefixIndex) -> MacState:
        """See MacState."""
        if self.is_lost:
            return MacState.LOST
        if self.is_draining:
            return MacState.DRAINING
        if self.is_cordoned:
            return MacState.CORDONED
        return MacState.READY if index.is_known(self.slot) else MacState.STARTING
