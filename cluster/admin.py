"""The admin face: fleet, index, explain, drain. gRPC calls it, and HTTP shows the same messages as JSON."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import asdict
from typing import Any

import grpc

from cluster.errors import ActorAway, InvalidRequest
from cluster.inference import new_request_id
from cluster.kv.hashing import hash_blocks
from cluster.kv.stats import KVStats
from cluster.kv_manager import ManagerStatus
from cluster.ray_calls import ActorCaller, manager_name
from cluster.routing.index import IndexStats
from cluster.routing.mac import MacState, MacStatus
from cluster.routing.router import Decision, RouteQuery
from cluster.served_models import ServedModels
from protos.cidery.v1 import admin_pb2

# A Mac that doesn't answer in this time is shown without its own numbers.
_STATUS_TIMEOUT_S = 2.0

_STATES = {
    MacState.STARTING: admin_pb2.MAC_STATE_STARTING,
    MacState.READY: admin_pb2.MAC_STATE_READY,
    MacState.DRAINING: admin_pb2.MAC_STATE_DRAINING,
    MacState.LOST: admin_pb2.MAC_STATE_LOST,
}


class AdminServicer:
    """Registered by `grpc_server.add_service`; methods are named as the rpcs. `context` is None from HTTP."""

    def __init__(self, router: ActorCaller, models: ServedModels) -> None:
        self._router = router
        self._models = models
        self._managers: dict[str, ActorCaller] = {}

    async def GetFleet(  # noqa: N802
        self, request: admin_pb2.GetFleetRequest, context: grpc.aio.ServicerContext | None
    ) -> admin_pb2.GetFleetResponse:
        """See admin.proto."""
        statuses: Sequence[MacStatus] = await self._router("fleet")
        own = await asyncio.gather(*(self._manager_status(status.info.name) for status in statuses))
        macs = {status.info.name: _mac(status, manager) for status, manager in zip(statuses, own, strict=True)}
        return admin_pb2.GetFleetResponse(macs=[macs[name] for name in sorted(macs)])

    async def GetIndex(  # noqa: N802
        self, request: admin_pb2.GetIndexRequest, context: grpc.aio.ServicerContext | None
    ) -> admin_pb2.GetIndexResponse:
        """See admin.proto."""
        stats: IndexStats = await self._router("index_stats")
        return admin_pb2.GetIndexResponse(
            num_keys=stats.num_keys,
            macs=[
                admin_pb2.MacIndex(
                    mac=each.mac,
                    epoch=each.epoch,
                    next_seq=each.next_seq or 0,
                    num_blocks=each.num_blocks,
                    num_events=each.num_events,
                    num_gaps=each.num_gaps,
                )
                for each in sorted(stats.macs, key=lambda each: each.mac)
            ],
        )

    async def Explain(  # noqa: N802
        self, request: admin_pb2.ExplainRequest, context: grpc.aio.ServicerContext | None
    ) -> admin_pb2.ExplainResponse:
        """See admin.proto."""
        if request.WhichOneof("subject") is None:
            raise InvalidRequest("subject", "is missing; give request_id, or text for what-if")
        if request.WhichOneof("subject") == "request_id":
            return _explanation(await self._router("explain", request.request_id))
        model = self._models.get(request.model)
        assert model.root is not None
        token_ids = (await self._models.text_prompt(model, request.text)).token_ids
        query = RouteQuery(
            request_id=new_request_id("what-if"),
            model=model.name,
            root_hash=model.root,
            block_hashes=tuple(hash_blocks(model.root, token_ids, model.block_size)),
            num_tokens=len(token_ids),
            max_tokens=max(1, model.max_model_len - len(token_ids)),
        )
        return _explanation(await self._router("what_if", query))

    async def Drain(  # noqa: N802
        self, request: admin_pb2.DrainRequest, context: grpc.aio.ServicerContext | None
    ) -> admin_pb2.DrainResponse:
        """See admin.proto."""
        await self._router("drain", _named(request.mac))
        await self._remember(request.mac, is_draining=True)
        return admin_pb2.DrainResponse(mac=await self._one(request.mac))

    async def Resume(  # noqa: N802
        self, request: admin_pb2.ResumeRequest, context: grpc.aio.ServicerContext | None
    ) -> admin_pb2.ResumeResponse:
        """See admin.proto."""
        await self._router("resume", _named(request.mac))
        await self._remember(request.mac, is_draining=False)
        return admin_pb2.ResumeResponse(mac=await self._one(request.mac))

    async def _one(self, name: str) -> admin_pb2.Mac:
        fleet = await self.GetFleet(admin_pb2.GetFleetRequest(), None)
        by_name = {mac.name: mac for mac in fleet.macs}
        return by_name[name]

    async def _remember(self, mac: str, *, is_draining: bool) -> None:
        """Tells the Mac itself, which outlives a router; one that is away comes back without a drain."""
        await _within(_STATUS_TIMEOUT_S, self._manager(mac)("set_draining", is_draining))

    async def _manager_status(self, mac: str) -> ManagerStatus | None:
        status: ManagerStatus | None = await _within(_STATUS_TIMEOUT_S, self._manager(mac)("status"))
        return status

    def _manager(self, mac: str) -> ActorCaller:
        return self._managers.setdefault(mac, ActorCaller(manager_name(mac)))


async def _within(seconds: float, call: Awaitable[Any]) -> Any:
    """None when the Mac is away: its row then shows what the router knows."""
    try:
        return await asyncio.wait_for(call, seconds)
    except (TimeoutError, ActorAway):
        return None


def _named(mac: str) -> str:
    if not mac:
        raise InvalidRequest("mac", "is missing; name the Mac as the fleet lists it")
    return mac


def _mac(status: MacStatus, manager: ManagerStatus | None) -> admin_pb2.Mac:
    info, load = status.info, status.load
    message = admin_pb2.Mac(
        name=info.name,
        state=_STATES[status.state],
        model=info.model,
        address=info.address,
        epoch=info.epoch,
        load=admin_pb2.Load(
            num_requests=load.num_requests,
            num_prefill_tokens=load.num_prefill_tokens,
            num_decoding=load.num_decoding,
        ),
        prefill_tokens_per_s=status.prefill_tokens_per_s,
    )
    if manager is not None:
        message.worker_memory_bytes = manager.worker_memory_bytes
        message.worker_pid = manager.worker_pid or 0
        message.blocks.CopyFrom(
            admin_pb2.Blocks(
                num_total=manager.num_blocks,
                num_used=manager.num_used_blocks,
                num_cached=manager.num_cached_blocks,
                num_free=manager.num_free_blocks,
                block_bytes=manager.block_bytes,
            )
        )
        if manager.kv is not None:
            message.kv_cache.CopyFrom(_kv_cache(manager.kv))
        if manager.scheduler is not None:
            stats = manager.scheduler
            message.scheduling.CopyFrom(
                admin_pb2.Scheduling(
                    num_running=stats.num_running,
                    num_waiting=stats.num_waiting,
                    num_preemptions=stats.num_preemptions,
                    num_steps=manager.num_steps,
                    num_prompt_tokens=stats.num_queried_tokens,
                    num_cached_tokens=stats.num_cached_tokens,
                    num_generated_tokens=manager.num_generated_tokens,
                    num_worker_restarts=manager.num_worker_restarts,
                )
            )
    return message


def _kv_cache(stats: KVStats) -> admin_pb2.KVCache:
    return admin_pb2.KVCache(
        referenced_bytes=stats.referenced_bytes,
        cached_bytes=stats.cached_bytes,
        free_bytes=stats.free_bytes,
        pinned_bytes=stats.pinned_bytes,
        # The fields have the names of the message's.
        groups=[admin_pb2.KVGroup(**asdict(group)) for group in stats.groups],
    )


def _explanation(decision: Decision) -> admin_pb2.ExplainResponse:
    return admin_pb2.ExplainResponse(
        request_id=decision.request_id,
        num_prompt_tokens=decision.num_tokens,
        chosen=decision.mac,
        reason=decision.reason,
        candidates=[
            admin_pb2.Candidate(
                mac=each.mac,
                num_matched_tokens=each.num_matched_tokens,
                num_prefill_tokens=each.num_prefill_tokens,
                wait_s=each.wait_s,
                prefill_s=each.prefill_s,
                decode_s=each.decode_s,
                total_s=each.total_s,
                excluded=each.excluded,
            )
            for each in decision.candidates
        ],
    )
