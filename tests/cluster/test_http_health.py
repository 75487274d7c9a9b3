"""/health tells whether a request could be answered: a Mac must be ready, and the router there."""

import httpx

from cluster.adapters import AdapterList, AdapterView
from cluster.errors import ActorAway
from cluster.http_server import HttpServer
from cluster.served_models import ServedModels


async def test_it_is_not_ok_while_the_router_is_away():
    is_there = True

    async def router(method: str, *arguments: object) -> object:
        if not is_there:
            raise ActorAway("router does not answer")
        view = AdapterView(AdapterList(), {}, {})
        return {"tokenizer_digests": {}, "fleet": (), "adapter_view": view}[method]

    models = ServedModels(router)  # type: ignore[arg-type]
    app = HttpServer(models, None, None, None).app()  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for expected in ("no Mac is ready", "router away", "no Mac is ready"):
            is_there = expected != "router away"
            try:
                await models.refresh()
            except ActorAway:
                assert not is_there
            answer = await client.get("/health")
            assert (answer.status_code, answer.json()["status"]) == (503, expected)


async def test_a_fault_of_ours_is_in_the_log(caplog):
    """The client is told no more than that."""
    app = HttpServer(None, None, None, None).app()  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.get("/health")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert "AttributeError" in caplog.text
