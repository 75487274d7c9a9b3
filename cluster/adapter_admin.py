"""Loading and unloading adapters at run time, over the whole fleet: what the admin face calls."""

import asyncio
import re
import time
from collections.abc import Callable

from cluster.adapter_files import adapter_bytes, adapter_digest, find_adapter
from cluster.adapters import AdapterSpec, AdapterState, AdapterStatus, AdapterView
from cluster.errors import InvalidRequest, NoMacReady
from cluster.ray_calls import ActorCaller
from cluster.routing.mac import MacState
from cluster.served_models import ServedModels
from protos.cidery.v1 import admin_pb2

_NAME = re.compile(r"[A-Za-z0-9._/:-]{1,128}")
# Reports of Macs come once a second, and when something has changed.
_POLL_S = 0.1
_LOAD_TIMEOUT_S = 120.0
_STATES = {
    AdapterState.LOADING: admin_pb2.ADAPTER_STATE_LOADING,
    AdapterState.READY: admin_pb2.ADAPTER_STATE_READY,
    AdapterState.FAILED: admin_pb2.ADAPTER_STATE_FAILED,
    AdapterState.LEAVING: admin_pb2.ADAPTER_STATE_LEAVING,
}


class AdapterAdmin:
    """See the module; errors are those of `cluster.errors`."""

    def __init__(self, router: ActorCaller, models: ServedModels, clock: Callable[[], float] = time.monotonic) -> None:
        self._router = router
        self._models = models
        self._clock = clock

    async def load(self, name: str, path: str, model_name: str) -> admin_pb2.Adapter:
        """On every Mac of the model that is up, or on none.

        Raises InvalidRequest for what is wrong with it, with each Mac's own words; NoMacReady if they take too long.
        """
        model = self._models.get(model_name)
        if model.parent:
            raise InvalidRequest("model", f"{model.name!r} is an adapter of {model.parent!r}; give a model")
        if not _NAME.fullmatch(name):
            raise InvalidRequest("name", f"must be 1 to 128 letters, digits and . _ - / :, got {name[:140]!r}")
        if name in self._models.names():
            raise InvalidRequest("name", f"{name!r} is the name of a model that is served")
        folder = find_adapter(path)
        digest = await asyncio.to_thread(adapter_digest, folder)
        spec = AdapterSpec(name, model.name, str(folder.resolve()), digest, adapter_bytes(folder), int(time.time()))
        before = (await self._view()).wanted
        await self._router("load_adapter", spec)
        try:
            await self._until_settled(spec)
        except (InvalidRequest, NoMacReady):
            if spec.name not in {each.name for each in before.specs}:
                await self._router("unload_adapter", name)
            raise
        finally:
            await self._models.refresh()
        return await self._one(name)

    async def unload(self, name: str) -> admin_pb2.Adapter:
        """Raises NotFound."""
        await self._router("unload_adapter", name)
        await self._models.refresh()
        return await self._one(name)

    async def list(self) -> list[admin_pb2.Adapter]:
        """By name; those that are unloaded and still run too."""
        view = await self._view()
        adapters = {
            (spec.name, spec.digest): admin_pb2.Adapter(
                name=spec.name, model=spec.model, path=spec.path, digest=spec.digest, num_bytes=spec.num_bytes
            )
            for spec in view.wanted.specs
        }
        wanted = set(adapters)
        for mac in sorted(view.by_mac):
            for each in view.by_mac[mac]:
                key, state = (each.name, each.digest), each.state
                if key not in wanted:
                    if state not in (AdapterState.READY, AdapterState.LEAVING):
                        continue
                    # The Mac may not have heard of it yet.
                    state = AdapterState.LEAVING
                adapter = adapters.setdefault(key, admin_pb2.Adapter(name=each.name, digest=each.digest))
                adapter.macs.add(mac=mac, state=_STATES[state], problem=each.problem)
        return [adapters[key] for key in sorted(adapters)]

    async def _until_settled(self, spec: AdapterSpec) -> None:
        """Every Mac that is up has it, or one says why not."""
        give_up_s = self._clock() + _LOAD_TIMEOUT_S
        while True:
            statuses = await self._statuses(spec)
            problems = [f"{mac}: {each.problem}" for mac, each in statuses.items() if each and each.problem]
            waiting = [mac for mac, each in statuses.items() if each is None or each.state is AdapterState.LOADING]
            if problems and not waiting:
                raise InvalidRequest("path", f"adapter {spec.name!r} was refused: {'; '.join(problems)}")
            if statuses and not waiting:
                return
            if self._clock() > give_up_s:
                who = ", ".join(waiting) or "no Mac is up"
                raise NoMacReady(f"adapter {spec.name!r} was not loaded in {_LOAD_TIMEOUT_S:.0f} s: {who}")
            await asyncio.sleep(_POLL_S)

    async def _statuses(self, spec: AdapterSpec) -> dict[str, AdapterStatus | None]:
        """Of each Mac of the model that is up; None where it has not said anything of this list yet."""
        macs: dict[str, MacState] = (await self._router("models")).get(spec.model, {})
        view = await self._view()
        found: dict[str, AdapterStatus | None] = {}
        for mac, state in macs.items():
            if state is not MacState.LOST:
                is_current = view.versions.get(mac) == view.wanted.version
                statuses = view.by_mac.get(mac, ()) if is_current else ()
                found[mac] = next((each for each in statuses if each.name == spec.name), None)
        return found

    async def _one(self, name: str) -> admin_pb2.Adapter:
        found = [adapter for adapter in await self.list() if adapter.name == name]
        return found[0] if found else admin_pb2.Adapter(name=name)

    async def _view(self) -> AdapterView:
        view: AdapterView = await self._router("adapter_view")
        return view
