"""One Mac at work: feeds the scheduler's plans to the worker, one ahead, and hands out what comes back.

Owns the scheduler, the worker child and the requests' way home. Everything runs on one asyncio loop, and no state is
read before an await and written after it.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from cluster import wire
from cluster.adapters import AdapterList
from cluster.config import MacConfig
from cluster.errors import (
    AdapterNotLoaded,
    CideryError,
    InvalidRequest,
    MacLost,
    Overloaded,
    RequestTooLong,
    StartupFailed,
)
from cluster.kv.hashing import BlockHash, root_hash
from cluster.kv.manager import KVCacheManager
from cluster.mac_adapters import MacAdapters
from cluster.mac_memory import kv_format, plan_kv
from cluster.mac_requests import request_of
from cluster.model_files import model_digest, tokenizer_digest
from cluster.routing.speed import StepSample
from cluster.scheduling import errors as refusals
from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.request import Update
from cluster.scheduling.scheduler import Scheduler
from cluster.self_benchmark import WorkerFailed, measure, sample_of
from cluster.worker_process import WorkerProcess, receive_in_time
from protos.cidery.node.v1 import node_pb2
from protos.cidery.worker.v1 import worker_pb2

log = logging.getLogger(__name__)

MAX_PLANS_IN_FLIGHT = 2
_RESTART_PAUSE_S = 1.0
_MAX_FAILED_STARTS = 3
_MAX_LOSSES = 3
# While nobody takes them.
_MAX_STEP_SAMPLES = 256


class UpdateSink(Protocol):
    """Where a request's updates go: one gateway's stream."""

    def deliver(self, updates: list[node_pb2.Update]) -> None:
        """All that one step did for requests of this sink; must not block."""


class MacEngine:
    """See the module. `on_change` is called when the router should know soon: a request ended, an epoch began."""

    def __init__(
        self, mac: str, config: MacConfig, model_folder: Path, log_path: Path, on_change: Callable[[], None]
    ) -> None:
        self.mac = mac
        self._config = config
        self._folder = model_folder
        self._log_path = log_path
        self._on_change = on_change
        self._digests = (model_digest(model_folder), tokenizer_digest(model_folder))
        self._worker: WorkerProcess | None = None
        self._in_flight: dict[int, StepSample] = {}  # by step_id; seconds are still to come
        self._sinks: dict[str, UpdateSink] = {}
        # Worker losses that each live request has been through.
        self._num_losses: dict[str, int] = {}
        self._is_running = False
        self._is_measured = False
        self.adapters = MacAdapters(
            config.model.name, config.kv.adapter_memory_bytes, self._send_to_worker, self._on_change
        )
        self.described: worker_pb2.Description | None = None
        self.scheduler: Scheduler | None = None
        self.kv: KVCacheManager | None = None
        self.root: BlockHash | None = None
        self.max_model_len = 0
        self.epoch = 0
        self.num_worker_restarts = 0
        # By kernel: starts of a worker at which its self-test turned it off.
        self.kernel_failures: Counter[str] = Counter()
        self.num_steps = 0
        self.num_generated_tokens = 0
        self.worker_memory_bytes = 0
        # Steps since the reporter last took them, so that the router can learn this Mac's speed.
        self.step_samples: deque[StepSample] = deque(maxlen=_MAX_STEP_SAMPLES)

    @property
    def num_requests(self) -> int:
        """Running and waiting."""
        return len(self._sinks)

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once."""
        return self._config.batch.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of one step."""
        return self._config.batch.max_num_batched_tokens

    @property
    def max_chunk_tokens(self) -> int:
        """Tokens of one prompt in a step."""
        return self._scheduler_config().max_chunk_tokens

    @property
    def is_ready(self) -> bool:
        """The worker has its model and takes plans."""
        return self._is_running

    @property
    def tokenizer_digest(self) -> str:
        """Of this Mac's copy of the model."""
        return self._digests[1]

    @property
    def worker_pid(self) -> int | None:
        """Of the worker now alive."""
        return self._worker.pid if self._worker else None

    async def supervise(self) -> None:
        """Keeps a worker running until cancelled. Raises StartupFailed when it can't be started three times running."""
        num_failed = 0
        try:
            while True:
                try:
                    await self._run_worker()
                    num_failed = 0
                except StartupFailed as error:
                    num_failed += 1
                    if num_failed == _MAX_FAILED_STARTS or self.scheduler is None:
                        raise
                    log.error("worker could not be started mac=%s try=%d error=%s", self.mac, num_failed, error)
                self.num_worker_restarts += 1
                await asyncio.sleep(_RESTART_PAUSE_S)
        finally:
            self._fail_all(MacLost(f"{self.mac} is shutting down"))

    def open(self, message: node_pb2.Open, sink: UpdateSink) -> None:
        """Takes a request in, or tells the sink at once why not."""
        try:
            finished = self._admit(message)
        except CideryError as error:
            sink.deliver([wire.failure_to_proto(message.request_id, error)])
            return
        if finished is not None:
            sink.deliver([wire.update_to_proto(finished)])
            return
        self._sinks[message.request_id] = sink
        self._pump()

    def abort(self, request_id: str, sink: UpdateSink) -> None:
        """Ends a sink's request and frees its blocks now; no update follows.

        No effect on a request that has ended, or that has come in again by another stream meanwhile.
        """
        if self._sinks.get(request_id) is not sink:
            return
        del self._sinks[request_id]
        if self.scheduler is not None and self.scheduler.abort(request_id):
            log.info("aborted request_id=%s", request_id)
            self._on_change()
            self._let_adapters_go()
            self._pump()

    def _admit(self, message: node_pb2.Open) -> Update | None:
        """Gives the request to the scheduler; an update if it had ended before it came here."""
        if self.scheduler is None or self.described is None:
            raise MacLost(f"{self.mac} has not finished starting")
        if message.root_hash != self.root:
            raise InvalidRequest(
                "root_hash", f"the gateway's model, tokenizer, KV format or block size differs from {self.mac}'s"
            )
        request = request_of(message, self.described, self._config.speculation)
        if request.adapter:
            self.adapters.require(request.adapter)
        try:
            return self.scheduler.add(request, time.monotonic())
        except refusals.RequestTooLong as error:
            raise RequestTooLong(str(error)) from error
        except refusals.QueueFull as error:
            raise Overloaded(str(error), error.retry_after_s) from error
        except refusals.Refused as error:
            raise InvalidRequest("request", str(error)) from error

    async def _run_worker(self) -> None:
        """From the start of one worker to its end."""
        # Once: a restarted worker gets the memory that was planned then, and has requests waiting for it.
        worker = await WorkerProcess.start(
            self._config, self._folder, self._log_path, measures_steps=self.scheduler is None
        )
        self._worker = worker
        try:
            described = await worker.connect()
            self.kernel_failures.update(described.failed_kernels)
            configure = self._prepare(described)
            worker.send(worker_pb2.ManagerMessage(configure=configure))
            answer = await worker.receive()
            if answer is None or answer.HasField("failure"):
                reason = "it ended" if answer is None else answer.failure.message
                raise StartupFailed(f"{self.mac}: the worker could not be configured: {reason}\n{worker.log_tail()}")
            await self._measure(worker)
            await self._load_adapters(worker)
            self._is_running = True
            log.info(
                "worker ready mac=%s pid=%d device=%s kernels=%s kv_bytes=%d num_blocks=%d",
                *(self.mac, worker.pid, described.device, described.kernels),
                *(answer.configured.kv_bytes, sum(configure.num_blocks)),
            )
            self._on_change()
            self._pump()
            await self._take_results(worker)
        except refusals.ProtocolError as error:
            log.error("worker and scheduler have parted mac=%s error=%s: restarting the worker", self.mac, error)
        finally:
            was_running, self._is_running = self._is_running, False
            self._worker = None
            await worker.stop()
            if was_running:
                log.warning("worker lost mac=%s pid=%d; its log ends:\n%s", self.mac, worker.pid, worker.log_tail())
                self._forget_worker()

    async def _measure(self, worker: WorkerProcess) -> None:
        """Once, so that the router knows from the start how fast this Mac is."""
        if self._is_measured:
            return
        assert self.kv is not None
        assert self.described is not None
        try:
            samples = await measure(worker, self.kv.layout, self._scheduler_config(), self.described.vocab_size)
        except WorkerFailed as error:
            raise StartupFailed(f"{self.mac}: the worker fails when measured: {error}\n{worker.log_tail()}") from error
        self._is_measured = True
        self.step_samples.extend(samples)

    async def _load_adapters(self, worker: WorkerProcess) -> None:
        """What the worker before this one had; requests whose adapter can't be had any more are given up."""
        while messages := self.adapters.take_unasked():
            for message in messages:
                worker.send(message)
                answer = await worker.receive()
                if answer is None or not answer.HasField("adapter_loaded"):
                    raise StartupFailed(f"{self.mac}: the worker fails when it loads adapters\n{worker.log_tail()}")
                self._adapter_loaded(answer.adapter_loaded)

    def follow_adapters(self, wanted: AdapterList) -> None:
        """The fleet's list of adapters has changed."""
        self.adapters.follow(wanted)
        self._let_adapters_go()

    def _adapter_loaded(self, message: worker_pb2.AdapterLoaded) -> None:
        if self.adapters.loaded(message):
            return
        error = AdapterNotLoaded(f"{self.mac} lost its worker and can't load the adapter again: {message.refusal}")
        for request_id, sink in list(self._sinks.items()):
            if self.scheduler is not None and self.scheduler.adapter_of(request_id) == message.digest:
                self.abort(request_id, sink)
                sink.deliver([wire.failure_to_proto(request_id, error)])

    def _let_adapters_go(self) -> None:
        if self.scheduler is not None:
            self.adapters.let_go(self.scheduler.uses_adapter)

    def _send_to_worker(self, message: worker_pb2.ManagerMessage) -> bool:
        """False while no worker runs."""
        if not self._is_running or self._worker is None:
            return False
        self._worker.send(message)
        return True

    async def _take_results(self, worker: WorkerProcess) -> None:
        """Results of plans, until the worker fails or is gone."""
        while (message := await receive_in_time(worker, lambda: bool(self._in_flight))) is not None:
            if message.HasField("failure"):
                log.error("worker failed mac=%s error=%s", self.mac, message.failure.message)
                return
            if message.HasField("adapter_loaded"):
                self._adapter_loaded(message.adapter_loaded)
            else:
                self._apply(message.result)

    def _prepare(self, described: worker_pb2.Description) -> worker_pb2.Configure:
        """Sizes the KV cache the first time; a restarted worker must match what the scheduler already works with."""
        if self.scheduler is None:
            self._plan_memory(described)
        elif self.described is not None and described.layers != self.described.layers:
            raise StartupFailed(f"{self.mac}: the restarted worker describes other layers than before")
        assert self.kv is not None
        assert self.root is not None
        self.described = described
        # New content, new epoch; a clock that jumped back must not repeat one.
        self.epoch = max(self.epoch + 1, time.time_ns())
        return wire.layout_to_proto(self.kv.layout, self.root)

    def _plan_memory(self, described: worker_pb2.Description) -> None:
        config = self._config
        self.max_model_len = min(config.model.max_model_len or described.max_model_len, described.max_model_len)
        try:
            # A sequence has at most a chunk in each plan.
            in_flight = MAX_PLANS_IN_FLIGHT * self._scheduler_config().max_chunk_tokens
            layout = plan_kv(described, config.kv, max_model_len=self.max_model_len, max_in_flight_tokens=in_flight)
        except ValueError as error:
            raise StartupFailed(f"{self.mac}: {error}") from error
        log.info(
            "memory planned mac=%s limit_bytes=%d weights_bytes=%d activation_bytes=%d kv_bytes=%d kv=%s",
            *(self.mac, described.memory_limit_bytes, described.weights_bytes, described.activation_bytes),
            *(layout.budget_bytes, kv_format(described)),
        )
        self.root = root_hash(
            model=self._digests[0],
            tokenizer=self._digests[1],
            kv_format=kv_format(described),
            block_size=layout.block_size,
        )
        self.kv = KVCacheManager(
            layout, policy=config.kv.retention, enable_prefix_caching=config.kv.enable_prefix_caching
        )
        self.scheduler = Scheduler(self.kv, self._scheduler_config())

    def _scheduler_config(self) -> SchedulerConfig:
        batch = self._config.batch
        return SchedulerConfig(
            max_num_seqs=batch.max_num_seqs,
            max_num_batched_tokens=batch.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_waiting=batch.max_waiting,
            max_plans_in_flight=MAX_PLANS_IN_FLIGHT,
            num_speculative_tokens=self._config.speculation.max_drafts,
        )

    def _pump(self) -> None:
        """Keeps one plan running and one queued behind it, as far as there is work."""
        if not self._is_running or self.scheduler is None or self._worker is None:
            return
        while len(self._in_flight) < MAX_PLANS_IN_FLIGHT:
            plan = self.scheduler.schedule(time.monotonic())
            if plan is None:
                return
            self._in_flight[plan.step_id] = sample_of(plan)
            self._worker.send(wire.plan_to_proto(plan))

    def _apply(self, message: worker_pb2.StepResult) -> None:
        assert self.scheduler is not None
        result = wire.result_from_proto(message)
        self.worker_memory_bytes = message.memory.active_bytes
        sample = self._in_flight.pop(result.step_id)
        updates = self.scheduler.apply(result)
        self._pump()  # before anything else: the worker must not wait for us
        self.num_steps += 1
        self.num_generated_tokens += sum(len(update.token_ids) for update in updates)
        # Drafts are rows too, or rows would seem dearer where tokens are guessed.
        num_rows = sample.num_decoding + sum(each.num_drafts for each in result.speculated)
        self.step_samples.append(replace(sample, num_decoding=num_rows, seconds=result.run_s))
        self._deliver(updates)
        if any(update.finish is not None for update in updates):
            self._on_change()
            self._let_adapters_go()

    def _deliver(self, updates: list[Update]) -> None:
        by_sink: dict[UpdateSink, list[node_pb2.Update]] = {}
        for update in updates:
            sink = self._sinks.get(update.request_id)
            if sink is None:
                continue
            by_sink.setdefault(sink, []).append(wire.update_to_proto(update))
            if update.finish is not None:
                del self._sinks[update.request_id]
        for sink, messages in by_sink.items():
            sink.deliver(messages)

    def _forget_worker(self) -> None:
        """The KV is gone; requests are not: they are computed again by the next worker."""
        assert self.scheduler is not None
        self._in_flight.clear()
        self.adapters.worker_lost()
        self.scheduler.worker_lost()
        self._give_up_on_killers()
        self._on_change()

    def _give_up_on_killers(self) -> None:
        """A request that was there at every one of three losses is taken for their cause."""
        self._num_losses = {request_id: self._num_losses.get(request_id, 0) + 1 for request_id in self._sinks}
        for request_id, num_losses in self._num_losses.items():
            if num_losses >= _MAX_LOSSES:
                sink = self._sinks[request_id]
                self.abort(request_id, sink)
                error = CideryError(f"the worker of {self.mac} died {num_losses} times while it ran this request")
                sink.deliver([wire.failure_to_proto(request_id, error)])

    def _fail_all(self, error: CideryError) -> None:
        sinks, self._sinks = self._sinks, {}
        for request_id, sink in sinks.items():
            sink.deliver([wire.failure_to_proto(request_id, error)])
