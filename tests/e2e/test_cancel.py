"""A client may leave at any moment: everything it held comes back, and nobody else notices."""

import asyncio
import random
import time

import grpc
import httpx
import pytest

from protos.cidery.v1 import inference_pb2, inference_pb2_grpc

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_REQUESTS = 200
SETTLE_S = 10


def job(number: int) -> dict:
    rng = random.Random(number)
    return {
        "prompt": [rng.randrange(3, 1500) for _ in range(rng.randint(1, 120))],
        "max_tokens": rng.randint(1, 60),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def over_http(client: httpx.AsyncClient, number: int, leave_after_s: float) -> None:
    async with client.stream("POST", "/v1/completions", json=job(number)) as response:
        assert response.status_code == 200
        await asyncio.wait_for(_drain(response), leave_after_s)


async def _drain(response: httpx.Response) -> None:
    async for _ in response.aiter_lines():
        pass


async def over_grpc(stub, number: int, leave_after_s: float) -> None:
    fields = job(number)
    request = inference_pb2.GenerateRequest(
        token_ids={"ids": fields["prompt"]},
        sampling={"max_tokens": fields["max_tokens"], "temperature": 0, "ignore_eos": True},
    )
    # Half by their own deadline, half by cancelling the call.
    if number % 4 == 1:
        async for _ in stub.Generate(request, timeout=leave_after_s):
            pass
    else:
        call = stub.Generate(request)
        asyncio.get_running_loop().call_later(leave_after_s, call.cancel)
        async for _ in call:
            pass


async def cancel_many(served, seed: int) -> int:
    """Requests over both faces, each left after a random time; how many were left before their end."""
    rng = random.Random(seed)
    limit = asyncio.Semaphore(24)
    num_left = 0

    async def one(number: int) -> None:
        nonlocal num_left
        async with limit:
            try:
                if number % 2:
                    await over_grpc(stub, number, rng.uniform(0.001, 0.4))
                else:
                    await over_http(client, number, rng.uniform(0.001, 0.4))
            except TimeoutError:
                num_left += 1
            except asyncio.CancelledError:
                num_left += 1
            except grpc.aio.AioRpcError as error:
                # The last: its deadline was too short from the start, so it was not admitted.
                ended = (
                    grpc.StatusCode.CANCELLED,
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                )
                if error.code() not in ended:
                    raise
                num_left += 1

    async with (
        grpc.aio.insecure_channel(served.grpc) as channel,
        httpx.AsyncClient(base_url=served.http, timeout=60) as client,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))
    return num_left


def assert_all_is_free(served) -> None:
    """Blocks, running and waiting requests, bookings: polled, because the last aborts are still on their way."""
    give_up_s = time.monotonic() + SETTLE_S
    while True:
        fleet = served.fleet()
        held = {name: _held(mac) for name, mac in fleet.items()}
        idle = (0, 0, 0, {"num_requests": 0, "num_prefill_tokens": "0", "num_decoding": 0})
        if all(each == idle for each in held.values()):
            break
        assert time.monotonic() < give_up_s, held
        time.sleep(0.1)
    for mac in fleet.values():
        blocks = mac["blocks"]
        assert blocks["num_free"] == blocks["num_total"]


def _held(mac: dict) -> tuple:
    scheduling = mac["scheduling"]
    return mac["blocks"]["num_used"], scheduling["num_running"], scheduling["num_waiting"], mac["load"]


@pytest.mark.parametrize("fixture", ["three_macs", "tiny_pool"])
def test_two_hundred_cancelled_requests_give_everything_back(request, oracle, fixture):
    served = request.getfixturevalue(fixture)
    num_left = asyncio.run(cancel_many(served, seed=3))
    assert num_left > NUM_REQUESTS // 4, "too few were cancelled for the test to mean anything"
    assert_all_is_free(served)
    for number in range(0, NUM_REQUESTS, 20):
        fields = job(number) | {"stream": False, "logprobs": 0}
        answer = served.client.post("/v1/completions", json=fields).json()
        tokens, logprobs = oracle(fields["prompt"], fields["max_tokens"], ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == len(tokens)
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
    assert_all_is_free(served)
