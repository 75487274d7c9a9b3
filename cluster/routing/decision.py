"""What was decided, and what is needed to explain it later: kept as it was, worked out when somebody asks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.kv.hashing import BlockHash
from cluster.routing.index import Match
from cluster.routing.policy import TIE, TIE_S, View
from cluster.routing.predict import Terms, terms_of


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """A request to be placed; `block_hashes` are those of the prompt's full blocks, `exclude` names of Macs.

    `session` is a hint where it was last. The rest says whose turn it is when requests have to wait: higher priorities
    first, tenants in proportion to their weights; `deadline_s` is how many seconds from now its first token is of use.
    """

    request_id: str
    model: str
    root_hash: BlockHash
    block_hashes: Sequence[BlockHash]
    num_tokens: int
    max_tokens: int
    exclude: frozenset[str] = frozenset()
    session: str = ""
    tenant: str = ""
    tenant_weight: float = 1.0
    priority: int = 0
    deadline_s: float | None = None
    # Digest of the adapter to run with, empty for none.
    adapter: str = ""

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"request {self.request_id}: num_tokens must be at least 1, got {self.num_tokens}")
        if not 0 < self.tenant_weight < float("inf"):
            raise ValueError(f"tenant {self.tenant!r}: weight must be positive and finite, got {self.tenant_weight}")

    @property
    def num_least_tokens(self) -> int:
        """What its context must hold: a prompt that is only read needs no room for an answer."""
        return self.num_tokens + min(1, self.max_tokens)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes. `num_matched_tokens` of its prompt will be there when it runs, by prediction."""

    request_id: str
    mac: str
    epoch: int
    address: str
    num_tokens: int
    num_matched_tokens: int
    decided_at_s: float


@dataclass(frozen=True, slots=True)
class GroupDepth:
    """How far one group of KV layers lets a prompt be resumed on a Mac."""

    group: int
    kind: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """One Mac's numbers for a request; `excluded` is empty if it could have been chosen.

    `num_held_tokens` can be resumed there, `num_matched_tokens` when prompts under way there have been computed.
    """

    mac: str
    num_held_tokens: int
    num_matched_tokens: int
    num_prefill_tokens: int
    groups: tuple[GroupDepth, ...]
    terms: Terms
    excluded: str

    @property
    def total_s(self) -> float:
        """What Macs are compared by."""
        return self.terms.total_s


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision, every Mac's numbers at that moment, and a sentence for people. `decision` is None: all excluded."""

    request_id: str
    num_tokens: int
    policy: str
    decision: Decision | None
    candidates: tuple[Candidate, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Trace:
    """All that a decision was made of. `names` are by slot; `closed` are reasons by slot."""

    view: View
    match: Match
    names: Sequence[str]
    closed: Mapping[int, str]
    kinds: Sequence[tuple[int, str]]
    policy: str
    # Mac time that the request will take, wherever it goes.
    cost_s: float
    # Set if Macs could take the request but none in time: how soon the soonest would.
    soonest_s: float | None = None
    decision: Decision | None = None

    @property
    def backlog_s(self) -> float:
        """How long the Mac that has least to do takes for it. O(Macs)."""
        return min(self.view.standings[slot].wait_s for slot in self.view.open_slots)

    def explain(self, request_id: str) -> Explanation:
        """O(Macs)."""
        view = self.view
        candidates = tuple(
            Candidate(
                mac=name,
                num_held_tokens=view.num_held[slot],
                num_matched_tokens=view.num_matched[slot],
                num_prefill_tokens=view.num_tokens - view.num_matched[slot],
                groups=self._groups(slot),
                terms=terms_of(
                    view.standings[slot],
                    view.num_held[slot],
                    view.num_matched[slot],
                    view.num_tokens,
                    view.num_output,
                ),
                excluded=self.closed.get(slot, ""),
            )
            for slot, name in enumerate(self.names)
            if name
        )
        return Explanation(
            request_id, view.num_tokens, self.policy, self.decision, candidates, self._reason(candidates)
        )

    def _groups(self, slot: int) -> tuple[GroupDepth, ...]:
        """Full attention goes as far as the content; another group as far as it let the prompt come."""
        bit, size = 1 << slot, self.view.block_size
        content = next((depth for mask, depth in self.match.content if mask & bit), 0)
        depths = {group: content for group, _ in self.kinds}
        for group, macs, _, lower in self.match.lowered:
            if macs & bit:
                depths[group] = lower
        return tuple(GroupDepth(group, kind, depths[group] * size) for group, kind in self.kinds)

    def _reason(self, candidates: Sequence[Candidate]) -> str:
        if self.decision is None:
            return "every Mac is excluded"
        chosen = next(each for each in candidates if each.mac == self.decision.mac)
        others = [each for each in candidates if each is not chosen and not each.excluded]
        held = f"{chosen.mac} holds {chosen.num_matched_tokens} of {self.view.num_tokens} prompt tokens"
        if not others:
            return f"{held} and is the only Mac that can take the request"
        best = min(others, key=lambda each: each.total_s)
        costs = f"{chosen.total_s:.3f} s there, {best.total_s:.3f} s on {best.mac}"
        if self.policy != "predicted_seconds":
            return f"{held}; chosen by {self.policy}: {costs}"
        most = max(others, key=lambda each: each.num_matched_tokens)
        if most.num_matched_tokens > chosen.num_matched_tokens:
            return f"{held}; {most.mac} holds {most.num_matched_tokens} but its queue costs more: {costs}"
        if chosen.num_matched_tokens > most.num_matched_tokens:
            return f"{held}, more than any other: {costs}"
        if abs(chosen.total_s - best.total_s) <= max(TIE * min(chosen.total_s, best.total_s), TIE_S):
            return f"{held}, as much as the best of the others, and has had less work of late: {costs}"
        return f"{held}, as much as the best of the others, and is less busy or faster: {costs}"
