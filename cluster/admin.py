"""The admin face: fleet, index, explain, drain and their kin. gRPC calls it; HTTP shows the same messages as JSON."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import asdict
from typing import Any

import grpc

from cluster.adapter_admin import AdapterAdmin
from cluster.errors import ActorAway, InvalidRequest
from cluster.inference import new_request_id
from cluster.kv.hashing import first_extras, hash_blocks
from cluster.kv.stats import KVStats
from cluster.kv_manager import ManagerStatus
from cluster.ray_calls import ActorCaller, manager_name
from cluster.routing.decision import Explanation, RouteQuery
from cluster.routing.index import IndexStats
from cluster.routing.mac import MacState, MacStatus
from cluster.served_models import ServedModels
from protos.cidery.v1 import admin_pb2

# A Mac that doesn't answer in this time is shown without its own numbers.
_STATUS_TIMEOUT_S = 2.0

_STATES = {
    MacState.STARTING: admin_pb2.MAC_STATE_STARTING,
    MacState.READY: admin_pb2.MAC_STATE_READY,
    MacState.DRAINING: admin_pb2.MAC_STATE_DRAINING,
    MacState.LOST: admin_pb2.MAC_STATE_LOST,
    MacState.CORDONED: admin_pb2.MAC_STATE_CORDONED,
}


class AdminServicer:
    """Registered by `grpc_server.add_service`; methods are named as the rpcs. `context` is None from HTTP."""

    def __init__(self, router: ActorCaller, models: ServedModels) -> None:
        self._router = router
        self._models = models
        self._managers: dict[str, ActorCaller] = {}
        self._adapters = AdapterAdmin(router, models)

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
                    next_seq=content.next_seq,
                    num_blocks=sum(content.num_blocks_by_group),
                    num_events=content.num_events,
                    num_gaps=content.num_gaps,
                    is_synced=content.is_synced,
                    num_blocks_by_group=content.num_blocks_by_group,
                    num_no_effect_events=content.num_no_effect,
                    num_repeated=content.num_repeated,
                    num_unknown_parents=content.num_unknown_parents,
                    num_digest_mismatches=content.num_digest_mismatches,
                )
                for each, content in sorted(((mac, mac.content) for mac in stats.macs), key=lambda pair: pair[0].mac)
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
        if not token_ids:
            raise InvalidRequest("text", "is empty; at least one token is needed")
        query = RouteQuery(
            request_id=new_request_id("what-if"),
            model=model.run_by,
            root_hash=model.root,
            block_hashes=tuple(hash_blocks(model.root, token_ids, model.block_size, first_extras("", model.adapter))),
            adapter=model.adapter,
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

    async def Cordon(  # noqa: N802
        self, request: admin_pb2.CordonRequest, context: grpc.aio.ServicerContext | None
    ) -> admin_pb2.CordonResponse:
        """See admin.proto."""
        await self._router("cordon", _named(request.mac), request.note)
        await self._remember(request.mac, is_draining=False, cordon=request.note)
        return admin_pb2.CordonResponse(mac=await self._one(request.mac))

    async def GetPlacement(  # noqa: N802
        self, request: admin_pb2.GetPlacementRequest, context: grpc.aio.ServicerContext | None
    ) -> admin_pb2.GetPlacementResponse:
        """See admin.proto."""
        models: dict[str, dict[str, MacState]] = await self._router("models")
        return admin_pb2.GetPlacementResponse(
            models=[
                admin_pb2.Placement(
                    model=model,
                    macs=[admin_pb2.PlacedMac(mac=mac, state=_STATES[macs[mac]]) for mac in sorted(macs)],
                )
                for model, macs in sorted(models.items())
            ]
        )

    async def Resume(  # noqa: N802
        self, request: admin_pb2.ResumeRequest, context: grpc.aio.ServicerContext | None
    ) -> admin_pb2.ResumeResponse:
        """See admin.proto."""
        await self._router("resume", _named(request.mac))
        await self._remember(request.mac, is_draining=False)
        return admin_pb2.ResumeResponse(mac=await self._one(request.mac))

    async def LoadAdapter(  # noqa: N802
        self, request: admin_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext | None
    ) -> admin_pb2.LoadAdapterResponse:
        """See admin.proto."""
        adapter = await self._adapters.load(request.name, request.path, request.model)
        return admin_pb2.LoadAdapterResponse(adapter=adapter)

    async def UnloadAdapter(  # noqa: N802
        self, request: admin_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext | None
    ) -> admin_pb2.UnloadAdapterResponse:
        """See admin.proto."""
        return admin_pb2.UnloadAdapterResponse(adapter=await self._adapters.unload(request.name))

    async def ListAdapters(  # noqa: N802
        self, request: admin_pb2.ListAdaptersRequest, context: grpc.aio.ServicerContext | None
    ) -> admin_pb2.ListAdaptersResponse:
        """See admin.proto."""
        return admin_pb2.ListAdaptersResponse(adapters=await self._adapters.list())

    async def _one(self, name: str) -> admin_pb2.Mac:
        fleet = await self.GetFleet(admin_pb2.GetFleetRequest(), None)
        by_name = {mac.name: mac for mac in fleet.macs}
        return by_name[name]

    async def _remember(self, mac: str, *, is_draining: bool, cordon: str | None = None) -> None:
        """Tells the Mac itself, which outlives a router; one that is away comes back without the mark."""
        await _within(_STATUS_TIMEOUT_S, self._manager(mac)("set_marks", is_draining, cordon))

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
        decode_step_s=status.decode_step_s,
        hot_tokens=status.hot_tokens,
        drift=admin_pb2.Drift(
            num_requests=status.drift.num_requests,
            num_predicted_tokens=status.drift.num_predicted_tokens,
            num_actual_tokens=status.drift.num_actual_tokens,
            num_error_tokens=status.drift.num_error_tokens,
            is_alarming=status.drift.is_alarming,
        ),
        note=status.note,
    )
    if manager is not None:
        message.worker_memory_bytes = manager.worker_memory_bytes
        message.worker_pid = manager.worker_pid or 0
        message.kernels = manager.kernels
        message.kernel_failures.update(manager.kernel_failures)
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
                    num_drafted_tokens=stats.num_drafted_tokens,
                    num_accepted_tokens=stats.num_accepted_tokens,
                )
            )
    return message


def _kv_cache(stats: KVStats) -> admin_pb2.KVCache:
    return admin_pb2.KVCache(
        referenced_bytes=stats.referenced_bytes,
        cached_bytes=stats.cached_bytes,
        free_bytes=stats.free_bytes,
        pinned_bytes=stats.pinned_bytes,
        # The fields have the names of the messages'.
        groups=[admin_pb2.KVGroup(**asdict(group)) for group in stats.groups],
        pools=[admin_pb2.KVPool(**asdict(pool)) for pool in stats.pools],
    )


def _explanation(explained: Explanation) -> admin_pb2.ExplainResponse:
    return admin_pb2.ExplainResponse(
        request_id=explained.request_id,
        num_prompt_tokens=explained.num_tokens,
        chosen=explained.decision.mac if explained.decision else "",
        reason=explained.reason,
        policy=explained.policy,
        candidates=[
            admin_pb2.Candidate(
                mac=each.mac,
                num_matched_tokens=each.num_matched_tokens,
                num_prefill_tokens=each.num_prefill_tokens,
                wait_s=each.terms.wait_s,
                prefill_s=each.terms.prefill_s,
                decode_s=each.terms.decode_s,
                total_s=each.total_s,
                excluded=each.excluded,
                num_held_tokens=each.num_held_tokens,
                groups=[
                    admin_pb2.GroupDepth(group=depth.group, kind=depth.kind, num_tokens=depth.num_tokens)
                    for depth in each.groups
                ],
                shared_s=each.terms.shared_s,
                stall_s=each.terms.stall_s,
                pressure_s=each.terms.pressure_s,
            )
            for each in explained.candidates
        ],
    )
