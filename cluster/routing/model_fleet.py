"""The Macs that serve one model: who is there, what they hold, what they have booked, how fast they are.

All of it is by slot, in lists that a decision reads as they are; nothing is made for each Mac at each decision. A Mac
keeps its slot from joining to leaving; slots of Macs that left are used again.
"""

from collections.abc import Sequence

from cluster.kv.spec import ChunkedLocalSpec, RecurrentStateSpec, SlidingWindowSpec
from cluster.routing.config import RoutingConfig
from cluster.routing.correction import SpeedCorrection
from cluster.routing.decision import Decision, RouteQuery, Trace
from cluster.routing.drift import DriftBook
from cluster.routing.history import BookingHistory
from cluster.routing.hits import by_slot, parting, with_pending
from cluster.routing.hot_set import HotSets
from cluster.routing.index import PrefixIndex
from cluster.routing.load import Booking, LoadBook
from cluster.routing.mac import MacInfo, MacState, MacStatus, kind_of
from cluster.routing.member import Member
from cluster.routing.policy import Policy, View
from cluster.routing.predict import MacBounds, Standing, first_token_s, prefill_s, standing_of, terms_of
from cluster.routing.speed import NUM_SCALING, StepCosts, StepModel, StepSample, assumed_costs, shape_of

# Weight of one answer's length in the usual one.
_OUTPUT_GAIN = 0.02


class ModelFleet:
    """One model's Macs. `open_mask` has the bits of those that take requests."""

    def __init__(self, info: MacInfo, config: RoutingConfig, policy: Policy) -> None:
        self.model = info.model
        self.block_size = info.block_size
        self.groups = info.groups
        self.root_hash = info.root_hash
        self.members: dict[str, Member] = {}
        self.index = PrefixIndex(info.groups, info.block_size)
        self.loads = LoadBook()
        self.hot = HotSets(config.hot_horizon_s)
        self.history = BookingHistory()
        self.open_mask = 0
        self.num_output_tokens = float(config.expected_output_tokens)
        self._config = config
        self._policy = policy
        self._by_slot: list[Member | None] = []
        self._names: tuple[str, ...] = ()
        self._standings: list[Standing] = []
        self._stale: set[int] = set()
        self._open_slots: tuple[int, ...] = ()
        self._least_max_model_len = 0
        self._has_unobserved = True
        # Whether there is more to a place than its content: a state or a window.
        self._keeps_ends = any(isinstance(group.spec, _WITH_ENDS) for group in info.groups)
        self._kinds = tuple((group.group_id, kind_of(group)) for group in info.groups)

    # Membership.

    def add(self, info: MacInfo) -> Member:
        """A Mac that is not there yet, in a slot of its own."""
        if None in self._by_slot:
            slot = self._by_slot.index(None)
        else:
            slot = len(self._by_slot)
            self._by_slot.append(None)
            self.loads.add_slot()
            self.hot.add_slot()
            self._standings.append(_NOBODY)
            self.history.add_slot()
        member = Member(info, slot, StepModel(self._assumed_costs()), DriftBook(), SpeedCorrection())
        self.members[info.name] = self._by_slot[slot] = member
        self._has_unobserved = True
        self.index.open(slot)
        self.refresh()
        return member

    def remove(self, name: str) -> tuple[Booking, ...]:
        """Free all that is known of a Mac; returns the bookings that it had."""
        member = self.members.pop(name)
        dropped = self.end_incarnation(member)
        self.index.close(member.slot)
        self._by_slot[member.slot] = None
        self.history.clear(member.slot)
        self.refresh()
        return dropped

    def end_incarnation(self, member: Member) -> tuple[Booking, ...]:
        """Its blocks are gone and so is what it ran; returns its bookings. Of the next nothing is known."""
        dropped = self.loads.drop(member.slot)
        self.hot.clear(member.slot)
        self.index.open(member.slot)
        member.num_foreign, member.adapters = 0, frozenset()
        self.touch(member.slot)
        return dropped

    def refresh(self) -> None:
        """To be called when a Mac came, went, or changed its state."""
        self._names = tuple("" if each is None else each.info.name for each in self._by_slot)
        self.open_mask = 0
        for member in self.members.values():
            if member.state(self.index) in (MacState.READY, MacState.STARTING):
                self.open_mask |= 1 << member.slot
            self._stale.add(member.slot)
        self._open_slots = tuple(slot for slot in range(len(self._by_slot)) if self.open_mask >> slot & 1)
        self._least_max_model_len = min((each.info.max_model_len for each in self.members.values()), default=0)

    def at(self, slot: int) -> Member:
        """The Mac in a slot that is not free."""
        member = self._by_slot[slot]
        assert member is not None, f"slot {slot} is free"
        return member

    def touch(self, slot: int) -> None:
        """Something that its standing is made of has changed."""
        self._stale.add(slot)

    def observe(self, member: Member, samples: Sequence[StepSample]) -> None:
        """Steps that the Mac has run."""
        if not samples:
            return
        if not member.speed.num_observed:
            member.speed = StepModel(self._assumed_costs())
        for index, sample in enumerate(samples):
            # Steps of one report that only decode are all alike: one tells as much as all of them.
            if sample.num_prefill_tokens or index == len(samples) - 1:
                member.speed.observe(sample)
        member.update_costs()
        self._stale.add(member.slot)
        if self._has_unobserved:
            unobserved = [each.slot for each in self.members.values() if not each.speed.num_observed]
            self._stale.update(unobserved)
            self._has_unobserved = bool(unobserved)

    def tick(self, now_s: float) -> None:
        """To be called every second: what is learnt of some Macs and not yet of others, and what fades. O(Macs)."""
        observed = [each for each in self.members.values() if each.speed.num_observed]
        shape = shape_of([each.speed for each in observed]) if observed else None
        for member in self.members.values():
            member.shape = shape if member.speed.num_observed else None
            member.update_costs()
            self.hot.expire(member.slot, now_s)
            self._stale.add(member.slot)

    def status(self, member: Member) -> MacStatus:
        """One row of the fleet."""
        return MacStatus(
            info=member.info,
            state=member.state(self.index),
            load=self.loads.load(member.slot),
            prefill_tokens_per_s=member.costs.prefill_tokens_per_s,
            decode_step_s=member.costs.decode_step_s,
            hot_tokens=self.hot.num_blocks[member.slot] * self.block_size,
            drift=member.drift.counts(),
            note=member.note,
        )

    # Decisions.

    def decide(self, query: RouteQuery, now_s: float) -> Trace:
        """Choose; changes nothing. `decision` is None if every Mac is excluded."""
        self._bring_up_to_date(now_s)
        open_slots, closed = self._eligible(query)
        match = self.index.match(query.block_hashes, query.num_tokens, -1)
        num_slots = len(self._by_slot)
        num_held = by_slot(match.resumable, num_slots)
        num_matched: Sequence[int] = num_held
        if self._policy.counts_pending and self.loads.pending:
            num_matched = with_pending(
                num_held,
                match,
                self.loads,
                query.block_hashes,
                query.num_tokens,
                self.block_size,
                keeps_ends=self._keeps_ends,
            )
        view = View(
            open_slots=open_slots,
            standings=self._standings.copy(),
            num_held=num_held,
            num_matched=num_matched,
            num_tokens=query.num_tokens,
            num_output=min(query.max_tokens, self.num_output_tokens),
            block_size=self.block_size,
            recent_work_s=self.history.work_s,
            last_booking=self.history.last_booking,
            hint=self.history.slot_of(query.session),
        )
        soonest_s = None
        if query.deadline_s is not None and open_slots:
            view, closed, soonest_s = self._in_time(view, closed, query.deadline_s)
        if not view.open_slots:
            return Trace(view, match, self._names, closed, self._kinds, self._config.policy, 0.0, soonest_s)
        slot = self._policy.choose(view)
        member = self.at(slot)
        decision = Decision(
            request_id=query.request_id,
            mac=member.info.name,
            epoch=member.info.epoch,
            address=member.info.address,
            num_tokens=query.num_tokens,
            num_matched_tokens=num_matched[slot],
            decided_at_s=now_s,
        )
        cost_s = _work_s(view, slot, num_matched[slot])
        policy = self._config.policy
        return Trace(view, match, self._names, closed, self._kinds, policy, cost_s, decision=decision)

    def book(self, query: RouteQuery, trace: Trace, now_s: float) -> None:
        """Count a decision's request on its Mac from now on."""
        assert trace.decision is not None
        member = self.members[trace.decision.mac]
        slot, num_matched = member.slot, trace.decision.num_matched_tokens
        # Without a prefix cache nothing of it can be shared, or is ever announced.
        hashes = query.block_hashes if member.info.is_caching else ()
        view = trace.view
        self.loads.book(
            Booking(
                query.request_id,
                slot,
                hashes,
                query.num_tokens,
                num_matched,
                now_s + self._config.lease_s,
                is_prediction=self.index.is_synced(slot),
                booked_at_s=now_s,
                # What others compute for it comes when they have their turn.
                predicted_s=first_token_s(view.standings[slot], num_matched, query.num_tokens)
                if num_matched == view.num_held[slot]
                else 0.0,
                factor=member.correction.factor,
                num_held_tokens=view.num_held[slot],
                # What is less than a block is not announced.
                num_ahead_tokens=_PLANS_IN_FLIGHT * member.info.max_chunk_tokens + self.block_size - 1,
                stop_depth=parting(trace.match, slot) if self._keeps_ends else 0,
            )
        )
        self.hot.touch(slot, hashes, num_matched // self.block_size, now_s)
        self.hot.expire(slot, now_s)
        self.history.book(slot, query.session, trace.cost_s, now_s)
        self._stale.add(slot)

    def first_token(self, booking: Booking, num_cached_tokens: int, now_s: float) -> bool:
        """Compare a request's first token with what was predicted; whether its Mac's hits are off too much by now."""
        member = self.at(booking.slot)
        if num_cached_tokens == booking.num_predicted_tokens and self.loads.is_latest(booking):
            member.correction.observe(booking.predicted_s, booking.factor, now_s - booking.booked_at_s)
            member.update_costs()
        return member.drift.observe(booking.num_tokens, booking.num_predicted_tokens, num_cached_tokens)

    def observe_output(self, num_tokens: int) -> None:
        """An answer has ended with so many tokens."""
        self.num_output_tokens += _OUTPUT_GAIN * (num_tokens - self.num_output_tokens)

    def check(self) -> None:
        """Raises AssertionError unless slots, states and books fit together."""
        self.index.check()
        self.loads.check()
        self.hot.check()
        self.history.check()
        for name, member in self.members.items():
            assert member.info.name == name
            assert self._by_slot[member.slot] is member
            assert self.index.is_open(member.slot)
            is_open = member.state(self.index) in (MacState.READY, MacState.STARTING)
            assert is_open == bool(self.open_mask >> member.slot & 1), f"{name} is filed as another state"
        assert sum(each is not None for each in self._by_slot) == len(self.members)

    def _assumed_costs(self) -> StepCosts:
        """A Mac that has not reported is taken for an average one, so that it gets its first work."""
        known = [each.costs for each in self.members.values() if each.speed.num_observed]
        if not known:
            return assumed_costs(self._config.default_prefill_tokens_per_s)
        return StepCosts(
            *(sum(values) / len(known) for values in zip(*(costs.weights for costs in known), strict=True))
        )

    def _bring_up_to_date(self, now_s: float) -> None:
        assumed = None
        for slot in self._stale:
            member = self._by_slot[slot]
            if member is None:
                self._standings[slot] = _NOBODY
                continue
            loads, costs = self.loads, member.costs
            if not member.speed.num_observed:
                assumed = costs = assumed or self._assumed_costs()
            self._standings[slot] = standing_of(
                costs,
                MacBounds(
                    member.info.max_num_seqs,
                    member.info.max_num_batched_tokens,
                    member.info.max_chunk_tokens,
                    max(1, member.info.token_capacity),
                ),
                self._config,
                prompts=loads.turns(slot),
                num_decoding=loads.num_decoding[slot] + member.num_foreign,
                decode_context_tokens=loads.decode_context_tokens[slot],
                hot_tokens=self.hot.num_blocks[slot] * self.block_size,
                num_output_tokens=self.num_output_tokens,
                recent_work_s=self.history.recent_work_s(slot, now_s),
            )
        self._stale.clear()

    def _eligible(self, query: RouteQuery) -> tuple[Sequence[int], dict[int, str]]:
        """Slots that may be chosen, and why the others may not."""
        if (
            len(self._open_slots) == len(self.members)
            and not query.exclude
            and not query.adapter
            and query.num_tokens < self._least_max_model_len
            and query.root_hash == self.root_hash
        ):
            return self._open_slots, {}
        closed = {member.slot: reason for member in self.members.values() if (reason := self._why_not(member, query))}
        return tuple(slot for slot in self._open_slots if slot not in closed), closed

    def _why_not(self, member: Member, query: RouteQuery) -> str:
        info, state = member.info, member.state(self.index)
        if state in _CLOSED:
            return _CLOSED[state] + (f": {member.note}" if member.note else "")
        if info.name in query.exclude:
            return "excluded by the request"
        if query.adapter and query.adapter not in member.adapters:
            return "has not loaded the adapter"
        if info.root_hash != query.root_hash:
            return f"its root hash is {info.root_hash.hex()}, the request's {query.root_hash.hex()}"
        if query.num_least_tokens > info.max_model_len:
            return f"a prompt of {query.num_tokens} tokens leaves no room in its context of {info.max_model_len}"
        return ""

    def _in_time(
        self, view: View, closed: dict[int, str], deadline_s: float
    ) -> tuple[View, dict[int, str], float | None]:
        """Only Macs that are predicted to give the first token in time; if there are none, how soon the soonest would.

        A Mac whose speed is not known is believed to be fast enough: else it might never be asked, and never learnt.
        """
        first_s = {}
        for slot in view.open_slots:
            if self.at(slot).speed.num_observed < NUM_SCALING:
                first_s[slot] = 0.0
                continue
            depths = view.num_held[slot], view.num_matched[slot]
            first_s[slot] = terms_of(view.standings[slot], *depths, view.num_tokens, view.num_output).first_token_s
        late = {
            slot: f"its first token would take {seconds:.1f} s, the deadline is {deadline_s:.1f} s"
            for slot, seconds in first_s.items()
            if seconds > _DEADLINE_SLACK * deadline_s
        }
        open_slots = tuple(slot for slot in view.open_slots if slot not in late)
        return view._replace(open_slots=open_slots), closed | late, None if open_slots else min(first_s.values())


# A Mac has planned so many steps that it has not told of yet, and tells of whole blocks.
_PLANS_IN_FLIGHT = 2
_WITH_ENDS = (SlidingWindowSpec, ChunkedLocalSpec, RecurrentStateSpec)
# Predictions are no better than this: what might just be met is tried.
_DEADLINE_SLACK = 1.25
_NOBODY = Standing((float("inf"), *(0.0,) * 7, (), ()), *(float("inf"),) * 2, (), (), *(0.0,) * 12, 0, 0, 0, 0, 1)
_CLOSED = {MacState.CORDONED: "cordoned", MacState.DRAINING: "draining", MacState.LOST: "lost"}


def _work_s(view: View, slot: int, num_matched: int) -> float:
    """Mac time that the request takes there: its prefill and its row."""
    standing = view.standings[slot]
    row_s = standing.row_s + standing.row_context_s * view.num_tokens
    return prefill_s(standing, num_matched, view.num_tokens) + view.num_output * row_s
