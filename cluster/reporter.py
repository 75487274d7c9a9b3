"""Keeps the router informed of one Mac: joins, sends events and speeds, and a snapshot when the router asks for one."""

import asyncio
import contextlib
import logging
import time

from cluster.errors import CideryError
from cluster.event_wire import PendingEvents, pack, pack_keys
from cluster.mac_engine import MacEngine
from cluster.ray_calls import router
from cluster.router_actor import MacReport, ReportAnswer
from cluster.routing.mac import MacInfo

log = logging.getLogger(__name__)

# The router takes a Mac for lost after 5 s of silence.
HEARTBEAT_S = 1.0
# A Ray call costs about a millisecond of CPU at both ends, so events are gathered; the end of a request hurries them,
# because its next turn may come at once.
_GATHER_S = 0.1
_HURRIED_GATHER_S = 0.005


class Reporter:
    """One Mac's side of the talk with the router. `failure` is why the router does not take it, if so."""

    def __init__(self, mac: str, model: str) -> None:
        self._mac = mac
        self._model = model
        self._router = router()
        self._pending = PendingEvents()
        self._hurry = asyncio.Event()
        # Numbers batches without a gap; it goes on over epochs, because a snapshot says where the next epoch begins.
        self._seq = 0
        self._joined_epoch = 0
        self._reported_s = 0.0
        self.failure = ""
        # Remembered here because the router forgets it when it is restarted.
        self.is_draining = False

    def hurry(self) -> None:
        """Something happened that the router should know soon."""
        self._hurry.set()

    async def run(self, engine: MacEngine, address: str) -> None:
        """Reports until cancelled."""
        while True:
            self._hurry.clear()
            try:
                await self._report(engine, address)
            except CideryError as error:
                # The router is away or refuses us: keep serving what we have and ask again.
                self.failure = str(error)
                log.warning("report failed mac=%s error=%s", self._mac, error)
                self._joined_epoch = 0
                await asyncio.sleep(HEARTBEAT_S)
            await asyncio.sleep(_HURRIED_GATHER_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), _GATHER_S)

    async def _report(self, engine: MacEngine, address: str) -> None:
        """One exchange, if there is anything to say; what changes meanwhile goes into the next."""
        if not engine.is_ready or engine.kv is None:
            return
        if engine.epoch != self._joined_epoch:
            await self._join(engine, address)
            return
        self._pending.add(engine.kv.take_events())
        now_s = time.monotonic()
        if not self._pending and now_s - self._reported_s < HEARTBEAT_S:
            return
        self._reported_s = now_s
        batches: tuple[bytes, ...] = ()
        if self._pending:
            batches = (pack(self._pending.take(self._mac, engine.epoch, self._seq)),)
            self._seq += 1
        prefills, engine.prefill_observations = engine.prefill_observations, []
        seconds = tuple((each.num_tokens, each.seconds) for each in prefills)
        answer = await self._router("report", MacReport(self._mac, engine.epoch, batches, seconds))
        if answer is ReportAnswer.RESYNC:
            await self._send_snapshot(engine)
        elif answer is ReportAnswer.JOIN:
            self._joined_epoch = 0
            self.hurry()

    async def _join(self, engine: MacEngine, address: str) -> None:
        assert engine.root is not None
        assert engine.kv is not None
        info = MacInfo(
            name=self._mac,
            epoch=engine.epoch,
            model=self._model,
            root_hash=engine.root,
            block_size=engine.kv.layout.block_size,
            address=address,
            max_model_len=engine.max_model_len,
            num_blocks=engine.kv.num_blocks,
        )
        answer = await self._router("join", info, engine.tokenizer_digest, is_draining=self.is_draining)
        if answer is ReportAnswer.RESYNC:
            await self._send_snapshot(engine)
        self._joined_epoch = info.epoch
        self.failure = ""

    async def _send_snapshot(self, engine: MacEngine) -> None:
        """The whole set as of now; pending transitions are part of it."""
        assert engine.kv is not None
        epoch = engine.epoch
        engine.kv.take_events()
        self._pending.clear()
        keys = pack_keys(engine.kv.snapshot())
        if await self._router("load_snapshot", self._mac, epoch, self._seq, keys) is ReportAnswer.JOIN:
            self._joined_epoch = 0
            self.hurry()
