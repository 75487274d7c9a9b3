"""The router as a Ray actor: one owner, one call at a time, so choosing and booking can't be torn apart.

Beside passing calls on it keeps time: Macs that go silent are lost, leases that run out are released.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from cluster.adapters import AdapterList, AdapterReport, AdapterSpec, AdapterView, FleetAdapters
from cluster.errors import (
    CideryError,
    InvalidRequest,
    MacsAway,
    ModelNotFound,
    NoMacReady,
    NotFound,
    Overloaded,
    RequestTooLong,
)
from cluster.event_wire import unpack
from cluster.routing.admission import Admission
from cluster.routing.config import RoutingConfig
from cluster.routing.decision import Decision, Explanation, RouteQuery
from cluster.routing.errors import (
    DeadlineUnmet,
    IncompatibleMac,
    NoMacAvailable,
    QueueFull,
    RoutingError,
    UnknownMac,
    UnknownModel,
    UnknownRequest,
)
from cluster.routing.index import Applied, IndexStats
from cluster.routing.mac import MacInfo, MacState, MacStatus
from cluster.routing.router import Router
from cluster.routing.speed import StepSample
from cluster.vital import run_or_exit

log = logging.getLogger(__name__)

# Macs report every second; a busy one may be late.
SILENCE_S = 5.0
_TICK_S = 1.0
_NO_ADAPTERS = AdapterList()


@dataclass(frozen=True, slots=True)
class MacReport:
    """What a Mac says every second, and whenever what it caches has changed."""

    mac: str
    epoch: int
    # Packed event batches in order, see event_wire.
    batches: tuple[bytes, ...]
    # The number of the next batch, and at times the digests of what is held before it.
    next_seq: int
    digests: tuple[int, ...] | None
    steps: tuple[StepSample, ...]
    # Running and waiting there, by its own count.
    num_requests: int
    adapters: AdapterReport = field(default_factory=AdapterReport)


@dataclass(frozen=True, slots=True)
class RequestNotes:
    """What became of requests, as the gateway saw it."""

    # (request_id, tokens of the prompt that the Mac found in its cache).
    first_token: tuple[tuple[str, int], ...]
    # (request_id, tokens of the answer; None if it was broken off).
    ended: tuple[tuple[str, int | None], ...]


class ReportAnswer(Enum):
    """What the router wants next."""

    OK = "ok"
    # Something was missed: compare digests.
    RESYNC = "resync"
    # Never heard of this incarnation (the router was restarted, or lost it): join again.
    JOIN = "join"
    # The list of adapters has changed: fetch it.
    ADAPTERS = "adapters"


class RouterActor:
    """See the module. Errors that leave it are those of `cluster.errors`."""

    def __init__(self, config: RoutingConfig | None = None) -> None:
        self._router = Router(config)
        self._admission = Admission(self._router, config or RoutingConfig())
        # Callers of `route` whose requests wait.
        self._waiting: dict[str, tuple[RouteQuery, asyncio.Future[Decision]]] = {}
        self._adapters = FleetAdapters()
        self._tokenizers: dict[str, str] = {}
        self._heard_s: dict[str, float] = {}
        self._ticker = run_or_exit(self._tick(), "router-ticker")

    async def ping(self) -> None:
        """Answers once the actor is up."""

    async def join(
        self,
        info: MacInfo,
        tokenizer_digest: str,
        *,
        is_draining: bool,
        cordon: str | None,
        adapters: AdapterList = _NO_ADAPTERS,
    ) -> ReportAnswer:
        """Adds a Mac or a new incarnation of one; digests must follow. Raises InvalidRequest if it doesn't fit.

        `is_draining`, `cordon` and `adapters` are what the Mac remembers, for a router that has been restarted.
        """
        is_known = self._router.macs.knows(info.name, info.epoch)
        try:
            applied = self._router.macs.join(info)
        except IncompatibleMac as error:
            log.error("mac refused mac=%s reason=%s", info.name, error)
            raise InvalidRequest("mac", str(error)) from error
        if is_draining:
            self._router.macs.drain(info.name)
        if cordon is not None:
            self._router.macs.cordon(info.name, cordon)
        self._adapters.adopt(adapters)
        if not is_known:
            self._adapters.forget(info.name)
        self._tokenizers[info.model] = tokenizer_digest
        self._heard_s[info.name] = time.monotonic()
        log.info("mac joined mac=%s epoch=%d model=%s address=%s", info.name, info.epoch, info.model, info.address)
        return ReportAnswer.OK if applied is Applied.OK else ReportAnswer.RESYNC

    async def report(self, report: MacReport) -> ReportAnswer:
        """Applies a Mac's events; the answer says whether its set is known from now on."""
        if not self._router.macs.knows(report.mac, report.epoch):
            return ReportAnswer.JOIN
        self._heard_s[report.mac] = time.monotonic()
        self._router.macs.observe_steps(report.mac, report.steps)
        self._router.macs.observe_load(report.mac, report.epoch, report.num_requests)
        for packed in report.batches:
            batch = unpack(packed)
            if self._router.macs.apply_events(batch.mac, batch.epoch, batch.seq, batch.events) is Applied.RESYNC:
                return ReportAnswer.RESYNC
        if report.digests is not None and self._differs(report.mac, report.epoch, report.next_seq, report.digests):
            return ReportAnswer.RESYNC
        self._router.macs.observe_adapters(report.mac, report.epoch, report.adapters.ready)
        is_behind = self._adapters.report(report.mac, report.adapters)
        self._dispatch()
        return ReportAnswer.ADAPTERS if is_behind else ReportAnswer.OK

    async def check_digests(
        self, mac: str, epoch: int, next_seq: int, digests: Sequence[int]
    ) -> tuple[int, ...] | None:
        """Groups in which the index differs from what a Mac holds before batch `next_seq`; None: join first."""
        self._heard(mac, epoch)
        return self._router.macs.check_digests(mac, epoch, next_seq, digests)

    async def differing_buckets(
        self, mac: str, epoch: int, digests: Mapping[int, Sequence[int]]
    ) -> dict[int, tuple[int, ...]] | None:
        """By group, the buckets of hashes in which it differs; None: join first."""
        self._heard(mac, epoch)
        return self._router.macs.differing_buckets(mac, epoch, digests)

    async def load_difference(
        self,
        mac: str,
        epoch: int,
        next_seq: int,
        buckets: Mapping[int, tuple[Sequence[int], bytes]],
        digests: Sequence[int],
    ) -> ReportAnswer:
        """By group, buckets and all that the Mac holds in them."""
        self._heard(mac, epoch)
        applied = self._router.macs.load_difference(mac, epoch, next_seq, buckets, digests)
        if applied is Applied.OK:
            log.info("mac in step mac=%s epoch=%d next_seq=%d", mac, epoch, next_seq)
            return ReportAnswer.OK
        return ReportAnswer.RESYNC if self._router.macs.knows(mac, epoch) else ReportAnswer.JOIN

    async def leave(self, mac: str, epoch: int) -> None:
        """The Mac's manager is shutting down."""
        self._router.macs.leave(mac, epoch)
        self._heard_s.pop(mac, None)
        self._adapters.forget(mac)

    async def lost(self, mac: str, epoch: int) -> None:
        """A gateway's stream to this incarnation broke; the Mac's own report takes it back if it lives."""
        if self._router.macs.knows(mac, epoch):
            log.warning("mac lost mac=%s epoch=%d", mac, epoch)
            self._router.macs.lost(mac)

    async def route(self, query: RouteQuery) -> Decision:
        """Chooses and books, once it is the request's turn.

        Raises ModelNotFound, NoMacReady, RequestTooLong; Overloaded if too many wait or its deadline can't be met.
        """
        self._forget_caller(query.request_id)
        try:
            decision = self._admission.submit(query, time.monotonic())
        except RoutingError as error:
            raise self._as_seen_outside(error, query) from error
        if decision is not None:
            return decision
        waiting: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._waiting[query.request_id] = query, waiting
        # Another may have been shed for it.
        self._dispatch()
        return await waiting

    async def what_if(self, query: RouteQuery) -> Explanation:
        """Chooses, books nothing. Raises ModelNotFound."""
        try:
            return self._router.what_if(query, time.monotonic())
        except UnknownModel as error:
            raise ModelNotFound(str(error)) from error

    async def note(self, notes: RequestNotes) -> None:
        """Progress of many requests at once."""
        now_s = time.monotonic()
        for request_id, num_cached_tokens in notes.first_token:
            if self._router.first_token(request_id, num_cached_tokens, now_s):
                explained = self._router.explain(request_id)
                mac = explained.decision.mac if explained.decision else ""
                log.error("cache hits on a mac are not as predicted mac=%s request_id=%s", mac, request_id)
        for request_id, num_tokens in notes.ended:
            self._admission.withdraw(request_id, num_tokens)
            self._forget_caller(request_id)
        self._dispatch()

    async def explain(self, request_id: str) -> Explanation:
        """The decision on a past request. Raises NotFound."""
        try:
            return self._router.explain(request_id)
        except UnknownRequest as error:
            raise NotFound(str(error)) from error

    async def drain(self, mac: str) -> None:
        """Nothing new goes to the Mac. Raises NotFound."""
        self._on_mac(self._router.macs.drain, mac)

    async def cordon(self, mac: str, note: str) -> None:
        """Nothing new goes to the host, even if it leaves and comes back. Raises NotFound."""
        self._on_mac(lambda name: self._router.macs.cordon(name, note), mac)

    async def resume(self, mac: str) -> None:
        """The Mac takes requests again. Raises NotFound."""
        self._on_mac(self._router.macs.resume, mac)

    async def fleet(self) -> tuple[MacStatus, ...]:
        """Every Mac that has joined and not left."""
        return self._router.fleet()

    async def models(self) -> dict[str, dict[str, MacState]]:
        """Which Macs serve which model, and their states."""
        return self._router.models()

    async def tokenizer_digests(self) -> dict[str, str]:
        """By model; a gateway whose own copy differs must not serve it."""
        return dict(self._tokenizers)

    async def adapters(self) -> AdapterList:
        """What every Mac is to have, for Macs."""
        return self._adapters.wanted

    async def adapter_view(self) -> AdapterView:
        """What every Mac is to have, and how far each is."""
        return self._adapters.view()

    async def load_adapter(self, spec: AdapterSpec) -> None:
        """Macs of its model load it when they report next. Raises InvalidRequest if its name is taken."""
        self._adapters.add(spec, time.time_ns())

    async def unload_adapter(self, name: str) -> None:
        """Macs take no new request for it and unload it after the last one. Raises NotFound."""
        self._adapters.remove(name, time.time_ns())

    async def index_stats(self) -> IndexStats:
        """The prefix index."""
        return self._router.index_stats()

    def _heard(self, mac: str, epoch: int) -> None:
        if self._router.macs.knows(mac, epoch):
            self._heard_s[mac] = time.monotonic()

    def _differs(self, mac: str, epoch: int, next_seq: int, digests: Sequence[int]) -> bool:
        """The periodic check: nobody knows of a reason, so a difference is a fault."""
        differing = self._router.macs.check_digests(mac, epoch, next_seq, digests)
        if differing:
            log.error("index and mac differ mac=%s epoch=%d groups=%s: comparing", mac, epoch, differing)
        return bool(differing)

    def _forget_caller(self, request_id: str) -> None:
        if request_id in self._waiting:
            _, waiting = self._waiting.pop(request_id)
            waiting.cancel()

    def _dispatch(self) -> None:
        """Answers callers whose turn has come, or who wait in vain."""
        if not self._waiting:
            return
        for outcome in self._admission.dispatch(time.monotonic()):
            query, waiting = self._waiting.pop(outcome.request_id)
            if outcome.decision is not None:
                waiting.set_result(outcome.decision)
            else:
                assert outcome.error is not None
                waiting.set_exception(self._as_seen_outside(outcome.error, query))

    def _as_seen_outside(self, error: RoutingError, query: RouteQuery) -> CideryError:
        if isinstance(error, UnknownModel):
            return ModelNotFound(str(error))
        if isinstance(error, QueueFull | DeadlineUnmet):
            return Overloaded(str(error), error.retry_after_s)
        if isinstance(error, NoMacAvailable) and error.is_permanent:
            return RequestTooLong(str(error))
        return (MacsAway if self._may_help_to_wait(query) else NoMacReady)(str(error))

    def _may_help_to_wait(self, query: RouteQuery) -> bool:
        """Whether a Mac of the model is only lost, or has yet to load the adapter or to tell that it has."""
        macs = self._router.models().get(query.model, {})
        return MacState.LOST in macs.values() or self._adapters.may_be_ready_soon(query.adapter, macs)

    def _on_mac(self, action: Callable[[str], None], mac: str) -> None:
        try:
            action(mac)
        except UnknownMac as error:
            raise NotFound(str(error)) from error

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            self._dispatch()
            for request_id in self._router.expire(now_s):
                log.warning("lease expired request_id=%s", request_id)
            for mac, heard_s in list(self._heard_s.items()):
                if now_s - heard_s > SILENCE_S:
                    log.warning("mac silent mac=%s silent_s=%.1f", mac, now_s - heard_s)
                    self._router.macs.lost(mac)
                    del self._heard_s[mac]
