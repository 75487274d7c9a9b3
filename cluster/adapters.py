"""Which adapters the fleet has: the list that the router keeps, and what each Mac says of it.

The list is level-triggered: it has a version, every report of a Mac says which version it follows, and a Mac that is
behind fetches the list and makes its worker like it. So a Mac that joins, or begins anew, gets what the others have. A
router that was restarted takes the newest list that a Mac brings.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from cluster.errors import InvalidRequest, NotFound


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter under its public name. `path` is a folder on every Mac; `digest` is of its content, alike on all."""

    name: str
    model: str
    path: str
    digest: str
    num_bytes: int
    created_s: int


class AdapterState(Enum):
    """Where an adapter stands on one Mac."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    # Unloaded, but requests still run with it.
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """One adapter on one Mac; `problem` is why it FAILED."""

    name: str
    digest: str
    state: AdapterState
    problem: str = ""


@dataclass(frozen=True, slots=True)
class AdapterList:
    """All adapters of the fleet; 0 is the version of a list that nobody has made yet."""

    version: int = 0
    specs: tuple[AdapterSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What a Mac says: the version that it follows, and how far it is."""

    version: int = 0
    statuses: tuple[AdapterStatus, ...] = ()

    @property
    def ready(self) -> frozenset[str]:
        """Digests of those that new requests may use."""
        return frozenset(each.digest for each in self.statuses if each.state is AdapterState.READY)


@dataclass(frozen=True, slots=True)
class AdapterView:
    """The list, and by Mac how far it is; for gateways."""

    wanted: AdapterList
    by_mac: dict[str, tuple[AdapterStatus, ...]]
    # Of the list that each Mac follows.
    versions: dict[str, int]


@dataclass(slots=True)
class FleetAdapters:
    """The router's: owns the list, remembers what Macs said last."""

    wanted: AdapterList = field(default_factory=AdapterList)
    _reports: dict[str, AdapterReport] = field(default_factory=dict)

    def add(self, spec: AdapterSpec, now_ns: int) -> None:
        """Wanted on every Mac of its model from now on; again, if it is there already, for Macs that failed.

        Raises InvalidRequest if its name means something else.
        """
        others = {each.name: each for each in self.wanted.specs}
        before = others.pop(spec.name, None)
        if before is not None and (before.digest, before.model) != (spec.digest, spec.model):
            what = f"an adapter of {before.model} with other content (digest {before.digest})"
            raise InvalidRequest("name", f"{spec.name!r} is taken by {what}; unload it first")
        self._replace((*others.values(), spec), now_ns)

    def remove(self, name: str, now_ns: int) -> None:
        """No longer wanted anywhere. Raises NotFound."""
        left = tuple(spec for spec in self.wanted.specs if spec.name != name)
        if len(left) == len(self.wanted.specs):
            known = ", ".join(spec.name for spec in self.wanted.specs) or "none"
            raise NotFound(f"no adapter is named {name!r}; loaded: {known}")
        self._replace(left, now_ns)

    def adopt(self, brought: AdapterList) -> None:
        """A Mac joins with the list that it follows: the newest counts."""
        if brought.version > self.wanted.version:
            self.wanted = brought

    def report(self, mac: str, report: AdapterReport) -> bool:
        """Remembers what a Mac says; whether it is behind."""
        self._reports[mac] = report
        return report.version != self.wanted.version

    def forget(self, mac: str) -> None:
        """The Mac has left, or begun anew."""
        self._reports.pop(mac, None)

    def may_be_ready_soon(self, digest: str, macs: Iterable[str]) -> bool:
        """Whether it is wanted, and one of the Macs has yet to load it or to tell what it has loaded.

        A router that begins anew, and whose Macs so far have begun anew too, doesn't know yet what is wanted.
        """
        if self.wanted.version and all(spec.digest != digest for spec in self.wanted.specs):
            return False
        settled = (AdapterState.READY, AdapterState.FAILED)
        statuses = (self._reports.get(mac, AdapterReport()).statuses for mac in macs)
        return any(all(each.digest != digest or each.state not in settled for each in told) for told in statuses)

    def view(self) -> AdapterView:
        """Everything."""
        statuses = {mac: report.statuses for mac, report in self._reports.items()}
        return AdapterView(self.wanted, statuses, {mac: report.version for mac, report in self._reports.items()})

    def _replace(self, specs: tuple[AdapterSpec, ...], now_ns: int) -> None:
        # A clock that jumped back must not make a list older than the one it replaces.
        self.wanted = AdapterList(max(now_ns, self.wanted.version + 1), specs)
