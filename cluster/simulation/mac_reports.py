"""How the router hears of one simulated Mac: cluster/reporter.py on virtual time, over a link that may lag and lose.

A report carries one batch of events and the steps since the last one; it is lost as a whole. A batch that is missed
shows at the next one, and the router compares digests: all that differs goes in one message. What answers the router is
not lost, its sender tries again.
"""

import random
from collections.abc import Sequence

from cluster.kv.events import BlockEvent
from cluster.kv.manager import KVCacheManager
from cluster.routing.digests import content_of
from cluster.routing.index import Applied
from cluster.routing.mac import MacInfo
from cluster.routing.router import Router
from cluster.routing.speed import StepSample
from cluster.simulation.timeline import Timeline

_GATHER_S = 0.1
_HURRIED_GATHER_S = 0.005


class MacReports:
    """One incarnation of a Mac; `stop` ends it."""

    def __init__(
        self,
        info: MacInfo,
        kv: KVCacheManager,
        router: Router,
        timeline: Timeline,
        *,
        lag_s: float,
        loss: float,
        rng: random.Random,
        told: tuple[float, float] = (1.0, 1.0),
        measured: Sequence[StepSample] = (),
    ) -> None:
        self._info = info
        self._kv = kv
        self._router = router
        self._timeline = timeline
        self._lag_s = lag_s
        self._loss = loss
        self._told = told
        self._rng = rng
        self._events: list[BlockEvent] = []
        # A Mac measures itself before it joins; that goes with its first report.
        self._steps: list[StepSample] = [self._as_told(step, step.seconds) for step in measured]
        self._num_requests = 0
        self._seq = 0
        self._next_s: float | None = None
        self._is_stopped = False
        self._is_resyncing = False
        self.num_sent = 0
        self.num_lost = 0
        self.num_snapshots = 0

    def join(self) -> None:
        """The first thing that the router hears of it."""
        if self._router.macs.join(self._info) is Applied.RESYNC:
            self._resync()
        self._timeline.after(self._lag_s, self._send, None)

    def stop(self) -> None:
        """The Mac is gone."""
        self._is_stopped = True

    def stepped(self, step: StepSample, run_s: float, num_requests: int, *, hurries: bool) -> None:
        """A step has ended; `hurries` if a request has too, whose next turn may come at once."""
        self._events += self._kv.take_events()
        self._steps.append(self._as_told(step, run_s))
        self._num_requests = num_requests
        at_s = self._timeline.now_s + (_HURRIED_GATHER_S if hurries else _GATHER_S)
        if self._next_s is None or at_s < self._next_s:
            self._next_s = at_s
            self._timeline.at(at_s, self._send, at_s)

    def _as_told(self, step: StepSample, run_s: float) -> StepSample:
        seconds = run_s * self._told[step.num_prefill_tokens > 0]
        return StepSample(
            step.num_prefill_tokens,
            step.prefill_context_tokens,
            step.num_decoding,
            step.decode_context_tokens,
            seconds,
        )

    def _send(self, due_s: float | None) -> None:
        if self._is_stopped or self._next_s != due_s:
            return
        self._next_s = None
        events, self._events = self._events, []
        steps, self._steps = self._steps, []
        seq, self._seq = self._seq, self._seq + bool(events)
        self.num_sent += 1
        if self._loss and self._rng.random() < self._loss:
            self.num_lost += 1
            return
        self._timeline.after(self._lag_s, self._arrive, seq, events, steps, self._num_requests)

    def _arrive(self, seq: int, events: Sequence[BlockEvent], steps: Sequence[StepSample], num_requests: int) -> None:
        name, epoch = self._info.name, self._info.epoch
        if not self._router.macs.knows(name, epoch):
            return
        self._router.macs.observe_steps(name, steps)
        self._router.macs.observe_load(name, epoch, num_requests)
        if (
            events
            and self._router.macs.apply_events(name, epoch, seq, events) is Applied.RESYNC
            and not self._is_stopped
        ):
            self._resync()

    def _resync(self) -> None:
        """All as of now; pending transitions are part of it."""
        if self._is_resyncing:
            return
        self._is_resyncing = True
        self.num_snapshots += 1
        self._kv.take_events()
        self._events.clear()
        digests = self._kv.digests()
        content = content_of(self._kv.snapshot(), len(digests))
        self._timeline.after(self._lag_s, self._compare, self._seq, digests, content)

    def _compare(self, next_seq: int, digests: Sequence[int], content: Sequence[bytes]) -> None:
        name, epoch = self._info.name, self._info.epoch
        self._is_resyncing = False
        if self._router.macs.check_digests(name, epoch, next_seq, digests):
            self._router.macs.load_snapshot(name, epoch, next_seq, content)
