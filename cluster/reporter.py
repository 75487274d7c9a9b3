"""Keeps the router informed of one Mac: joins, sends events and steps, and compares digests when asked."""

import asyncio
import contextlib
import logging
import time

from cluster.adapters import AdapterReport
from cluster.errors import CideryError
from cluster.event_wire import Batch, pack
from cluster.mac_engine import MacEngine
from cluster.ray_calls import router
from cluster.router_actor import MacReport, ReportAnswer
from cluster.routing.digests import bucket_digests, content_of, hashes_in, in_buckets
from cluster.routing.mac import MacInfo

log = logging.getLogger(__name__)

# The router takes a Mac for lost after 5 s of silence.
HEARTBEAT_S = 1.0
# How often the router is told what the Mac holds, in a few bytes, so that nothing stays wrong for long.
_DIGEST_S = 10.0
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
        self._hurry = asyncio.Event()
        # Numbers batches without a gap; it goes on over epochs, because digests say where the next epoch begins.
        self._seq = 0
        self._joined_epoch = 0
        self._reported_s = 0.0
        self._digest_s = 0.0
        self._told_adapters = AdapterReport()
        self.failure = ""
        # Remembered here because the router forgets it when it is restarted.
        self.is_draining = False
        self.cordon: str | None = None

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
        now_s = time.monotonic()
        events = engine.kv.take_events()
        adapters = engine.adapters.report()
        if not events and adapters == self._told_adapters and now_s - self._reported_s < HEARTBEAT_S:
            return
        self._reported_s, self._told_adapters = now_s, adapters
        batches: tuple[bytes, ...] = ()
        if events:
            batches = (pack(Batch(self._mac, engine.epoch, self._seq, events)),)
            self._seq += 1
        digests = None
        if now_s - self._digest_s >= _DIGEST_S:
            self._digest_s, digests = now_s, engine.kv.digests()
        steps = tuple(engine.step_samples)
        engine.step_samples.clear()
        report = MacReport(self._mac, engine.epoch, batches, self._seq, digests, steps, engine.num_requests, adapters)
        await self._obey(await self._router("report", report), engine)

    async def _obey(self, answer: ReportAnswer, engine: MacEngine) -> None:
        if answer is ReportAnswer.RESYNC:
            await self._resync(engine)
        elif answer is ReportAnswer.JOIN:
            self._joined_epoch = 0
            self.hurry()
        elif answer is ReportAnswer.ADAPTERS:
            engine.follow_adapters(await self._router("adapters"))

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
            groups=engine.kv.layout.groups,
            token_capacity=engine.kv.layout.token_capacity,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_chunk_tokens=engine.max_chunk_tokens,
            is_caching=engine.kv.is_caching,
        )
        answer = await self._router(
            "join",
            info,
            engine.tokenizer_digest,
            is_draining=self.is_draining,
            cordon=self.cordon,
            adapters=engine.adapters.followed,
        )
        self._joined_epoch = info.epoch
        # What else it has to say follows at once.
        self._reported_s = 0.0
        self.failure = ""
        await self._obey(answer, engine)

    async def _resync(self, engine: MacEngine) -> None:
        """Digests first; then those of 256 buckets of the groups that differ; then what is in the buckets that do.

        Each message tells the state at its time, before batch `_seq`: events up to then are part of it.
        """
        assert engine.kv is not None
        epoch = engine.epoch
        engine.kv.take_events()
        differing = await self._router("check_digests", self._mac, epoch, self._seq, engine.kv.digests())
        if not differing or engine.epoch != epoch:
            if differing is None:
                await self._obey(ReportAnswer.JOIN, engine)
            return
        engine.kv.take_events()
        digests = engine.kv.digests()
        content = content_of(engine.kv.snapshot(), len(digests))
        by_group = {group: hashes_in(content[group]) for group in range(len(digests))}
        wanted = await self._router(
            "differing_buckets", self._mac, epoch, {group: bucket_digests(each) for group, each in by_group.items()}
        )
        if wanted is None:
            await self._obey(ReportAnswer.JOIN, engine)
            return
        difference = {
            group: (buckets, in_buckets(by_group[group], buckets)) for group, buckets in wanted.items() if buckets
        }
        answer = await self._router("load_difference", self._mac, epoch, self._seq, difference, digests)
        if answer is ReportAnswer.RESYNC:
            # Blocks changed while it was asked for, or a message was lost: once more, from the next report on.
            log.warning("still not in step mac=%s epoch=%d seq=%d", self._mac, epoch, self._seq)
            return
        await self._obey(answer, engine)
