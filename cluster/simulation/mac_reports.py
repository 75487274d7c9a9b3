"""How the router hears of one simulated Mac: cluster/reporter.py on virtual time, over a link that may lag and lose.

A report carries one batch of events and the speeds seen since the last one; it is lost as a whole. A batch that is
missed shows at the next one, and the router asks for a snapshot; snapshots are not lost, their senders try again.
"""

import random

from cluster.event_wire import Batch, PendingEvents
from cluster.kv.manager import KVCacheManager
from cluster.routing.index import Applied
from cluster.routing.mac import MacInfo
from cluster.routing.router import Router
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
        told_factor: float,
        rng: random.Random,
    ) -> None:
        self._info = info
        self._kv = kv
        self._router = router
        self._timeline = timeline
        self._lag_s = lag_s
        self._loss = loss
        self._told_factor = told_factor
        self._rng = rng
        self._pending = PendingEvents()
        self._prefills: list[tuple[int, float]] = []
        self._seq = 0
        self._next_s: float | None = None
        self._is_stopped = False
        self._is_resyncing = False
        self.num_sent = 0
        self.num_lost = 0
        self.num_snapshots = 0

    def join(self) -> None:
        """The first thing that the router hears of it."""
        if self._router.join(self._info) is Applied.RESYNC:
            self._send_snapshot()

    def stop(self) -> None:
        """The Mac is gone."""
        self._is_stopped = True

    def stepped(self, num_prefill_tokens: int, run_s: float, *, hurries: bool) -> None:
        """A step has ended; `hurries` if a request has too, whose next turn may come at once."""
        self._pending.add(self._kv.take_events())
        if num_prefill_tokens:
            self._prefills.append((num_prefill_tokens, run_s * self._told_factor))
        if not self._pending and not self._prefills:
            return
        at_s = self._timeline.now_s + (_HURRIED_GATHER_S if hurries else _GATHER_S)
        if self._next_s is None or at_s < self._next_s:
            self._next_s = at_s
            self._timeline.at(at_s, self._send, at_s)

    def _send(self, due_s: float) -> None:
        if self._is_stopped or self._next_s != due_s:
            return
        self._next_s = None
        batch = None
        if self._pending:
            batch = self._pending.take(self._info.name, self._info.epoch, self._seq)
            self._seq += 1
        prefills, self._prefills = self._prefills, []
        self.num_sent += 1
        if self._loss and self._rng.random() < self._loss:
            self.num_lost += 1
            return
        self._timeline.after(self._lag_s, self._arrive, batch, prefills)

    def _arrive(self, batch: Batch | None, prefills: list[tuple[int, float]]) -> None:
        name, epoch = self._info.name, self._info.epoch
        if not self._router.knows(name, epoch):
            return
        for num_tokens, seconds in prefills:
            self._router.observe_prefill(name, num_tokens, seconds)
        if batch is None:
            return
        answer = self._router.apply_events(name, epoch, batch.seq, batch.stored, batch.removed)
        if answer is Applied.RESYNC and not self._is_stopped:
            self._send_snapshot()

    def _send_snapshot(self) -> None:
        """All as of now; pending transitions are part of it."""
        if self._is_resyncing:
            return
        self._is_resyncing = True
        self.num_snapshots += 1
        self._kv.take_events()
        self._pending.clear()
        self._timeline.after(self._lag_s, self._load_snapshot, self._seq, self._kv.snapshot())

    def _load_snapshot(self, next_seq: int, blocks: list[tuple[int, bytes]]) -> None:
        name, epoch = self._info.name, self._info.epoch
        self._is_resyncing = False
        if self._router.knows(name, epoch):
            self._router.load_snapshot(name, epoch, next_seq, blocks)  # type: ignore[arg-type]
