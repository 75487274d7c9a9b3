"""Runs a trace on a fleet: what the gateway does with requests, on virtual time.

The router, the KV managers and the schedulers are the real ones, called as cluster/conductor.py, cluster/reporter.py
and cluster/mac_engine.py call them. Equal inputs give equal results.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.config import LINK_SILENCE_S
from cluster.kv.hashing import root_hash
from cluster.kv.manager import KVCacheManager
from cluster.kv.planner import plan_layout
from cluster.mac_engine import MAX_PLANS_IN_FLIGHT
from cluster.routing.admission import Admission
from cluster.routing.config import RoutingConfig
from cluster.routing.decision import Decision, RouteQuery
from cluster.routing.errors import NoMacAvailable, RoutingError
from cluster.routing.errors import QueueFull as RouterQueueFull
from cluster.routing.mac import MacInfo
from cluster.routing.router import Router
from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.errors import QueueFull, RequestTooLong
from cluster.scheduling.plan import StepPlan, StepResult
from cluster.scheduling.request import Request, SamplingParams, Update
from cluster.scheduling.scheduler import Scheduler
from cluster.self_benchmark import sample_of
from cluster.simulation.errors import SimulationError
from cluster.simulation.failures import Failure
from cluster.simulation.fleet import FleetSpec, MacSpec
from cluster.simulation.mac_reports import MacReports
from cluster.simulation.outcome import Outcome, RequestOutcome, Usage
from cluster.simulation.simulated_mac import Script, SimulatedMac, SimulatedWorker, self_benchmark
from cluster.simulation.timeline import Timeline
from cluster.simulation.trace import Trace

MAX_TRIES = 4
_MODEL = "simulated"
# As in cluster/conductor.py and cluster/router_actor.py.
_NOTES_PERIOD_S = 0.02
_TICK_S = 1.0
_NO_MAC_PATIENCE_S = 30.0
_NO_MAC_PAUSE_S = 0.5
# Gateway to Mac.
_HOP_S = 0.001


@dataclass(frozen=True, slots=True)
class Options:
    """Beside trace and fleet. Raises ValueError."""

    routing: RoutingConfig = field(default_factory=RoutingConfig)
    seed: int = 0
    # From a Mac's report to the router's knowing it, and the share of reports that never arrive.
    event_lag_s: float = 0.001
    event_loss: float = 0.0
    failures: tuple[Failure, ...] = ()
    retention: str = "value"

    def __post_init__(self) -> None:
        if not 0 <= self.event_lag_s < float("inf"):
            raise ValueError(f"event_lag_s must be at least 0, got {self.event_lag_s}")
        if not 0 <= self.event_loss < 1:
            raise ValueError(f"event_loss must be at least 0 and below 1, got {self.event_loss}")


@dataclass(slots=True)
class _Live:
    """One request on its way, over all its Macs."""

    index: int
    request_id: str
    arrived_s: float
    outcome: RequestOutcome
    num_generated: int = 0
    mac: str = ""
    excluded: set[str] = field(default_factory=set)
    is_noted: bool = False
    gives_up_s: float = 0.0


@dataclass(slots=True)
class _Slot:
    """A place in the fleet: the Mac that is there now, if any."""

    spec: MacSpec
    epoch: int = 0
    mac: SimulatedMac | None = None
    reports: MacReports | None = None
    live: dict[str, _Live] = field(default_factory=dict)


class Simulation:
    """One run. Raises SimulationError for a failure of a Mac that is not there, or one too small for its model."""

    def __init__(
        self, trace: Trace, fleet: FleetSpec, options: Options, on_done: Callable[[], object] | None = None
    ) -> None:
        self._trace = trace
        self._fleet = fleet
        self._options = options
        self._on_done = on_done
        self._timeline = Timeline()
        self._rng = random.Random(f"{options.seed}-events")
        self._root = root_hash(model=_MODEL, tokenizer=_MODEL, kv_format=_MODEL, block_size=trace.block_size)
        self.router = Router(options.routing)
        self._admission = Admission(self.router, options.routing)
        # Those that wait in the router's own queue, with what they asked.
        self._waiting: dict[str, tuple[_Live, RouteQuery]] = {}
        self._slots = {spec.name: _Slot(spec) for spec in fleet.macs}
        self._successors: dict[int, list[int]] = {}
        self._num_open = len(trace.requests)
        self._usage = {spec.name: Usage() for spec in fleet.macs}
        self._outcomes: list[RequestOutcome] = []
        for failure in options.failures:
            if failure.mac not in self._slots:
                raise SimulationError(f"no Mac is named {failure.mac!r}; there are {', '.join(self._slots)}")

    def run(self) -> Outcome:
        """From the first arrival to the last answer."""
        for slot in self._slots.values():
            self._start_mac(slot)
        # Once the router knows that the Macs are empty.
        start_s = self._options.event_lag_s
        first_s = self._trace.requests[0].at_s - start_s if self._trace.requests else 0.0
        for index, request in enumerate(self._trace.requests):
            if request.after is None:
                self._timeline.at(request.at_s - first_s, self._arrive, index)
            else:
                self._successors.setdefault(request.after, []).append(index)
        for failure in self._options.failures:
            self._timeline.at(start_s + failure.at_s, self._fail, failure)
        self._timeline.after(_TICK_S, self._tick)
        self._timeline.run(lambda: self._num_open == 0)
        self._outcomes.sort(key=lambda each: each.index)
        return Outcome(self._trace.name, self._timeline.now_s, tuple(self._outcomes), self._usage)

    def check(self) -> None:
        """Asserts that the real parts are sound. O(all)."""
        self.router.check()
        self._admission.check()
        for slot in self._slots.values():
            if slot.mac is not None:
                slot.mac.scheduler.check()

    def _start_mac(self, slot: _Slot) -> None:
        spec, fleet, limits = slot.spec, self._fleet, slot.spec.limits
        try:
            layout = plan_layout(
                fleet.layers,
                kv_budget_bytes=spec.kv_bytes,
                max_model_len=fleet.max_model_len,
                block_size=self._trace.block_size,
                max_in_flight_tokens=MAX_PLANS_IN_FLIGHT * limits.max_num_batched_tokens,
            )
            config = SchedulerConfig(
                max_model_len=fleet.max_model_len,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_chunk_tokens=limits.max_chunk_tokens,
                max_waiting=limits.max_waiting,
                max_plans_in_flight=MAX_PLANS_IN_FLIGHT,
            )
        except ValueError as error:
            raise SimulationError(f"{spec.name}: {error}") from error
        kv = KVCacheManager(layout, policy=self._options.retention)
        worker = SimulatedWorker(spec.costs, self._trace.block_size)
        slot.epoch += 1
        slot.mac = SimulatedMac(spec.name, Scheduler(kv, config), kv, worker, self._timeline, self._stepped)
        info = MacInfo(
            name=spec.name,
            epoch=slot.epoch,
            model=_MODEL,
            root_hash=self._root,
            block_size=self._trace.block_size,
            address=spec.name,
            max_model_len=fleet.max_model_len,
            num_blocks=kv.num_blocks,
            groups=layout.groups,
            token_capacity=layout.token_capacity,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_chunk_tokens=limits.max_chunk_tokens,
        )
        slot.reports = MacReports(
            info,
            kv,
            self.router,
            self._timeline,
            lag_s=self._options.event_lag_s,
            loss=self._options.event_loss,
            told=(spec.told_factor, spec.told_prefill_factor),
            rng=self._rng,
            measured=self_benchmark(spec.costs, limits.max_chunk_tokens),
        )
        slot.reports.join()

    def _arrive(self, index: int) -> None:
        trace, now_s = self._trace.requests[index], self._timeline.now_s
        outcome = RequestOutcome(index, trace.session, now_s, trace.num_prompt_tokens, trace.num_output_tokens)
        live = _Live(index, str(index), now_s, outcome, gives_up_s=now_s + _NO_MAC_PATIENCE_S)
        self._route(live)

    def _route(self, live: _Live) -> None:
        """Chooses and books; waits a while if no Mac is ready, as one may come back."""
        trace, now_s = self._trace.requests[live.index], self._timeline.now_s
        num_tokens = trace.num_prompt_tokens + live.num_generated
        hashes = self._trace.prompt_hashes(trace)
        if live.num_generated:
            hashes = self._trace.all_hashes(live.index)[: num_tokens // self._trace.block_size]
        query = RouteQuery(
            request_id=live.request_id,
            model=_MODEL,
            root_hash=self._root,
            block_hashes=hashes,
            num_tokens=num_tokens,
            max_tokens=self._max_tokens(live.index),
            exclude=frozenset(live.excluded),
        )
        try:
            decision = self._admission.submit(query, now_s)
        except RoutingError as error:
            self._not_routed(live, error)
            return
        if decision is None:
            self._waiting[live.request_id] = (live, query)
        else:
            self._send(live, query, decision)

    def _dispatch(self) -> None:
        """Those whose turn has come."""
        for outcome in self._admission.dispatch(self._timeline.now_s):
            live, query = self._waiting.pop(outcome.request_id)
            if outcome.decision is not None:
                self._send(live, query, outcome.decision)
            else:
                assert outcome.error is not None
                self._not_routed(live, outcome.error)

    def _not_routed(self, live: _Live, error: RoutingError) -> None:
        """No Mac may take it now: it asks again for a while, as one may come back."""
        if isinstance(error, RouterQueueFull):
            self._end(live, rejected="the router's queue is full")
        elif not isinstance(error, NoMacAvailable) or error.is_permanent:
            self._end(live, rejected="too long")
        elif self._timeline.now_s > live.gives_up_s:
            self._end(live, rejected="no Mac ready")
        else:
            live.excluded.clear()
            self._timeline.after(_NO_MAC_PAUSE_S, self._route, live)

    def _send(self, live: _Live, query: RouteQuery, decision: Decision) -> None:
        """To the Mac that was chosen."""
        live.mac, live.is_noted = decision.mac, False
        if not live.outcome.num_tries:
            live.outcome.num_predicted_tokens = decision.num_matched_tokens
        live.outcome.num_tries += 1
        live.outcome.mac = decision.mac
        self._slots[decision.mac].live[live.request_id] = live
        self._timeline.after(_HOP_S, self._open, live, live.outcome.num_tries, query)

    def _max_tokens(self, index: int) -> int:
        trace = self._trace.requests[index]
        room = self._fleet.max_model_len - trace.num_prompt_tokens
        return max(1, min(room, max(trace.max_tokens, trace.num_output_tokens)))

    def _open(self, live: _Live, number: int, query: RouteQuery) -> None:
        """The request reaches the Mac that was chosen at its try of this number."""
        slot = self._slots[live.mac]
        if live.outcome.num_tries != number or slot.mac is None:
            return  # It has moved on, or will when it is noticed that the Mac is gone.
        trace = self._trace.requests[live.index]
        num_tokens = min(trace.num_tokens, self._fleet.max_model_len)
        request = Request(
            request_id=live.request_id,
            token_ids=(live.index,) + (0,) * (query.num_tokens - 1),
            num_prompt_tokens=trace.num_prompt_tokens,
            block_hashes=tuple(query.block_hashes),
            max_tokens=query.max_tokens,
            sampling=SamplingParams(),
            boundaries=trace.boundaries,
        )
        try:
            slot.mac.add(request, Script(self._trace.all_hashes(live.index), num_tokens))
        except QueueFull:
            self._move_on(live, "queue full")
        except RequestTooLong:
            self._end(live, rejected="too long")

    def _move_on(self, live: _Live, reason: str) -> None:
        """Its Mac is gone or has refused it."""
        self._slots[live.mac].live.pop(live.request_id, None)
        live.excluded.add(live.mac)
        if live.outcome.num_tries >= MAX_TRIES:
            self._end(live, rejected=reason)
        else:
            self._route(live)

    def _stepped(self, mac: SimulatedMac, plan: StepPlan, result: StepResult, updates: list[Update]) -> None:
        now_s, slot = self._timeline.now_s, self._slots[mac.name]
        step = sample_of(plan)
        self._usage[mac.name].add(now_s, result.run_s, step.num_prefill_tokens, len(updates), mac.scheduler)
        hurries = False
        for update in updates:
            live = slot.live[update.request_id]
            live.num_generated += len(update.token_ids)
            outcome = live.outcome
            if outcome.first_token_s is None:
                outcome.first_token_s = now_s - live.arrived_s
                outcome.num_cached_tokens = update.num_cached_tokens
                outcome.queue_s = update.queue_s
            if not live.is_noted:
                live.is_noted = True
                args = (live.request_id, update.num_cached_tokens)
                self._timeline.after(_NOTES_PERIOD_S, self._note_first_token, *args)
            if update.finish is not None:
                hurries = True
                del slot.live[live.request_id]
                mac.forget(live.index)
                self._end(live)
        assert slot.reports is not None
        slot.reports.stepped(step, result.run_s, len(slot.live), hurries=hurries)

    def _end(self, live: _Live, rejected: str = "") -> None:
        now_s = self._timeline.now_s
        self._slots[live.mac].live.pop(live.request_id, None) if live.mac else None
        live.outcome.rejected = rejected
        live.outcome.total_s = now_s - live.arrived_s
        num_output = None if rejected else live.num_generated
        self._timeline.after(_NOTES_PERIOD_S, self._note_end, live.request_id, num_output)
        self._outcomes.append(live.outcome)
        self._num_open -= 1
        if self._on_done is not None:
            self._on_done()
        for index in self._successors.pop(live.index, ()):
            self._timeline.after(self._trace.requests[index].delay_s, self._arrive, index)

    def _note_first_token(self, request_id: str, num_cached_tokens: int) -> None:
        self.router.first_token(request_id, num_cached_tokens, self._timeline.now_s)
        self._dispatch()

    def _note_end(self, request_id: str, num_output_tokens: int | None) -> None:
        self._admission.withdraw(request_id, num_output_tokens)
        self._dispatch()

    def _fail(self, failure: Failure) -> None:
        slot = self._slots[failure.mac]
        if slot.mac is None:
            return
        assert slot.reports is not None
        slot.mac.kill()
        slot.reports.stop()
        slot.mac, slot.reports = None, None
        self._timeline.after(LINK_SILENCE_S, self._noticed, slot, slot.epoch)
        if failure.lasts_s is not None:
            self._timeline.after(failure.lasts_s, self._come_back, slot)

    def _noticed(self, slot: _Slot, epoch: int) -> None:
        """The gateway has heard nothing of it for so long that it is taken for lost."""
        if self.router.macs.knows(slot.spec.name, epoch):
            self.router.macs.lost(slot.spec.name)
        self._move_all(slot)

    def _come_back(self, slot: _Slot) -> None:
        self._move_all(slot)
        self._start_mac(slot)

    def _move_all(self, slot: _Slot) -> None:
        if slot.mac is None:
            for live in list(slot.live.values()):
                self._move_on(live, "Macs were lost")

    def _tick(self) -> None:
        self.router.expire(self._timeline.now_s)
        self._dispatch()
        self._timeline.after(_TICK_S, self._tick)
