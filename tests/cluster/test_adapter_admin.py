"""Loading over the fleet, seen from the gateway: all Macs or none, and who is waited for."""

import json
from types import SimpleNamespace

import pytest

from cluster.adapter_admin import AdapterAdmin
from cluster.adapters import AdapterReport, AdapterSpec, AdapterState, AdapterStatus, FleetAdapters
from cluster.errors import InvalidRequest, ModelNotFound, NoMacReady, NotFound
from cluster.routing.mac import MacState
from cluster.served_models import ServedModel, ServedModels
from protos.cidery.v1 import admin_pb2


class Router:
    """The router's own table; each Mac does at the next look what a test says."""

    def __init__(self, **macs: MacState) -> None:
        self.macs = macs
        self.adapters = FleetAdapters()
        self.says: dict[str, AdapterState | str | None] = {}
        self.now_ns = 0

    async def __call__(self, method: str, *arguments):
        if method == "adapter_view":
            self._report()
            return self.adapters.view()
        if method == "models":
            return {"m": self.macs}
        self.now_ns += 1
        return getattr(self.adapters, {"load_adapter": "add", "unload_adapter": "remove"}[method])(
            *arguments, self.now_ns
        )

    def _report(self) -> None:
        wanted = self.adapters.wanted
        for mac in self.macs:
            says = self.says.get(mac)
            if says is None:
                continue
            state, problem = (AdapterState.FAILED, says) if isinstance(says, str) else (says, "")
            statuses = tuple(AdapterStatus(spec.name, spec.digest, state, problem) for spec in wanted.specs)
            self.adapters.report(mac, AdapterReport(wanted.version, statuses))


class Models:
    """Two models of one gateway."""

    def __init__(self) -> None:
        self.num_refreshed = 0

    def get(self, name: str):
        return SimpleNamespace(name=name or "m", parent="m" if name == "pirate" else "")

    def names(self):
        return ("m",)

    async def refresh(self) -> None:
        self.num_refreshed += 1


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_parameters": {"rank": 2}}))
    (tmp_path / "adapters.safetensors").write_bytes(b"weights")
    return str(tmp_path)


def admin_of(router) -> AdapterAdmin:
    seconds = iter(range(100_000))
    return AdapterAdmin(router, Models(), clock=lambda: 30.0 * next(seconds))


async def test_loaded_when_every_mac_that_is_up_has_it(folder):
    router = Router(a=MacState.READY, b=MacState.DRAINING, gone=MacState.LOST)
    router.says = {"a": AdapterState.READY, "b": AdapterState.READY}
    adapter = await admin_of(router).load("pirate", folder, "")
    assert [(mac.mac, mac.state) for mac in adapter.macs] == [
        ("a", admin_pb2.ADAPTER_STATE_READY),
        ("b", admin_pb2.ADAPTER_STATE_READY),
    ]
    assert (adapter.name, adapter.model, adapter.num_bytes) == ("pirate", "m", 7)


async def test_one_that_refuses_it_takes_it_from_all_with_its_own_words(folder):
    router = Router(a=MacState.READY, b=MacState.READY)
    router.says = {"a": AdapterState.READY, "b": "rank 9 of 8"}
    with pytest.raises(InvalidRequest, match="path: adapter 'pirate' was refused: b: rank 9 of 8"):
        await admin_of(router).load("pirate", folder, "")
    assert router.adapters.wanted.specs == ()


@pytest.mark.parametrize("says", [AdapterState.LOADING, None])
async def test_who_takes_too_long_is_named_and_nothing_is_left(folder, says):
    router = Router(a=MacState.READY)
    router.says = {"a": says}
    with pytest.raises(NoMacReady, match="was not loaded in 120 s: a"):
        await admin_of(router).load("pirate", folder, "")
    assert router.adapters.wanted.specs == ()


async def test_without_a_mac_there_is_nothing_to_load_it(folder):
    with pytest.raises(NoMacReady, match="no Mac is up"):
        await admin_of(Router()).load("pirate", folder, "")


async def test_loading_again_keeps_it_whatever_comes_of_it(folder):
    """The second time is for Macs that had failed; one that fails again doesn't take it from the others."""
    router = Router(a=MacState.READY)
    router.says = {"a": AdapterState.READY}
    await admin_of(router).load("pirate", folder, "")
    router.says = {"a": "broken"}
    with pytest.raises(InvalidRequest, match="broken"):
        await admin_of(router).load("pirate", folder, "")
    assert [spec.name for spec in router.adapters.wanted.specs] == ["pirate"]


@pytest.mark.parametrize(
    ("name", "model", "field"),
    [("m", "", "name"), ("", "", "name"), ("a b", "", "name"), ("x" * 129, "", "name"), ("x", "pirate", "model")],
)
async def test_names_and_models_that_cannot_be_are_refused(folder, name, model, field):
    with pytest.raises(InvalidRequest) as refused:
        await admin_of(Router(a=MacState.READY)).load(name, folder, model)
    assert refused.value.field == field


async def test_what_is_unloaded_is_listed_as_long_as_requests_run(folder):
    router = Router(a=MacState.READY, b=MacState.READY)
    router.says = {"a": AdapterState.READY, "b": AdapterState.READY}
    admin = admin_of(router)
    digest = (await admin.load("pirate", folder, "")).digest
    router.says = {}  # nobody has heard of it yet
    left = await admin.unload("pirate")
    assert {mac.state for mac in left.macs} == {admin_pb2.ADAPTER_STATE_LEAVING}
    router.adapters.report("a", AdapterReport(9, (AdapterStatus("pirate", digest, AdapterState.LEAVING),)))
    router.adapters.report("b", AdapterReport(9, (AdapterStatus("pirate", digest, AdapterState.FAILED),)))
    (adapter,) = await admin.list()
    assert [mac.mac for mac in adapter.macs] == ["a"]
    router.adapters.report("a", AdapterReport(9))
    assert await admin.list() == []
    with pytest.raises(NotFound):
        await admin.unload("pirate")


class TestServedModels:
    """What a gateway makes of the list."""

    def models(self, view) -> ServedModels:
        async def router(method: str):
            return {"tokenizer_digests": {}, "fleet": (), "adapter_view": view}[method]

        models = ServedModels(router)
        models._models["m"] = ServedModel("m", None, None, 1, None, root=b"r" * 16, block_size=16, max_model_len=99)
        return models

    async def test_an_adapter_is_a_model_and_goes_when_the_list_says_so(self):
        fleet = FleetAdapters()
        fleet.add(AdapterSpec("pirate", "m", "/p", "d1", 7, 5), 1)
        fleet.add(AdapterSpec("other", "unknown", "/p", "d2", 7, 5), 2)
        models = self.models(fleet.view())
        await models.refresh()
        pirate = models.get("pirate")
        assert (pirate.name, pirate.parent, pirate.adapter, pirate.run_by) == ("pirate", "m", "d1", "m")
        assert (pirate.created_s, pirate.max_model_len, pirate.root) == (5, 99, b"r" * 16)
        assert [model.name for model in models.all()] == ["m", "pirate"]
        assert models.names() == ("m",)
        assert models.get("").name == "m"
        models._refresh_adapters(FleetAdapters().view(), ())  # a router that has just begun knows nothing
        assert models.get("pirate").adapter == "d1"
        fleet.remove("pirate", 3)
        models._refresh_adapters(fleet.view(), ())
        with pytest.raises(ModelNotFound, match="model 'pirate' is not served; served: m"):
            models.get("pirate")
