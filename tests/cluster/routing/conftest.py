"""A router with Macs that are as easy to write down as the claims about them."""

from collections.abc import Callable, Sequence

import pytest

from cluster.kv.events import BlocksRemoved, BlocksStored
from cluster.kv.hashing import BlockHash, hash_blocks, root_hash
from cluster.kv.layout import KVGroup
from cluster.kv.spec import FullAttentionSpec
from cluster.routing.config import RoutingConfig
from cluster.routing.decision import Candidate, Decision, RouteQuery
from cluster.routing.index import Applied
from cluster.routing.mac import MacInfo
from cluster.routing.router import Router
from cluster.routing.speed import StepSample

BLOCK_SIZE = 16
MODEL = "tiny"
ROOT = root_hash(model=MODEL, tokenizer="t", kv_format="f16", block_size=BLOCK_SIZE)
FULL = (KVGroup(0, 0, FullAttentionSpec(1, 8), (0, 1), 4096),)
# Every Mac is told by `Fleet.add` to prefill 1,000 tokens a second at any context and to decode for nothing: each
# predicted second below can be worked out in the head.
PLAIN = RoutingConfig(lease_s=60.0, crowd_weight=0.0, pressure_weight=0.0, stall_weight=0.0, decode_weight=0.0)


class Fleet:
    """Router, Macs and a clock that the test moves."""

    def __init__(self, config: RoutingConfig = PLAIN) -> None:
        self.router = Router(config)
        self.now_s = 0.0
        self._next_seq: dict[str, int] = {}
        self._num_requests = 0

    def info(self, name: str, epoch: int = 1, **changes: object) -> MacInfo:
        values: dict = {
            "name": name,
            "epoch": epoch,
            "model": MODEL,
            "root_hash": ROOT,
            "block_size": BLOCK_SIZE,
            "address": f"{name}.local:7000",
            "max_model_len": 100_000,
            "num_blocks": 10_000,
            "groups": FULL,
            "token_capacity": 160_000,
            # One prompt at a time: who comes later waits for all of those before.
            "max_chunk_tokens": 512,
        }
        return MacInfo(**(values | changes))

    def add(
        self, *names: str, epoch: int = 1, holds: Sequence[BlockHash] = (), speed: float = 1_000.0, **changes: object
    ) -> None:
        for name in names:
            self.router.macs.join(self.info(name, epoch, **changes))
            assert self.router.macs.load_snapshot(name, epoch, 0, (b"".join(holds),)) is Applied.OK
            self._next_seq[name] = 0
            self.learn(name, speed)

    def learn(self, name: str, tokens_per_s: float) -> None:
        """The Mac's speed, exactly: a step costs nothing but its prefill tokens."""
        found = self.router.macs._find(name)
        assert found is not None
        set_speed(found[1].speed, tokens_per_s)
        found[1].update_costs()
        found[0].touch(found[1].slot)

    def store(self, name: str, prompt: Sequence[int], first: int = 0, end: int | None = None, epoch: int = 1) -> None:
        """Blocks of a prompt, in order."""
        hashes = hashes_of(prompt)
        end = len(hashes) if end is None else end
        if first < end:
            parent = hashes[first - 1] if first else None
            self._events(name, epoch, [BlocksStored(0, b"".join(hashes[first:end]), parent, first)])

    def remove(self, name: str, hashes: Sequence[BlockHash], epoch: int = 1) -> None:
        self._events(name, epoch, [BlocksRemoved(0, b"".join(hashes))])

    def query(self, prompt: Sequence[int], request_id: str = "", **changes: object) -> RouteQuery:
        self._num_requests += 1
        values: dict = {
            "request_id": request_id or f"r{self._num_requests}",
            "model": MODEL,
            "root_hash": ROOT,
            "block_hashes": hashes_of(prompt),
            "num_tokens": len(prompt),
            "max_tokens": 100,
        }
        values |= changes
        values["exclude"] = frozenset(values.get("exclude", ()))
        return RouteQuery(**values)

    def route(self, prompt: Sequence[int], request_id: str = "", **changes: object) -> Decision:
        decision = self.router.route(self.query(prompt, request_id, **changes), self.now_s)
        self.router.check()
        return decision

    def candidates(self, decision: Decision) -> dict[str, Candidate]:
        """Each Mac's numbers at the time of a decision."""
        return {each.mac: each for each in self.router.explain(decision.request_id).candidates}

    def finish(self, decision: Decision, prompt: Sequence[int]) -> None:
        """The Mac computes the prompt, says so, and the request ends."""
        self.store(decision.mac, prompt, epoch=decision.epoch)
        self.router.first_token(decision.request_id)
        self.router.release(decision.request_id)
        self.router.check()

    def loads(self) -> dict[str, tuple[int, int, int]]:
        return {
            each.info.name: (each.load.num_requests, each.load.num_prefill_tokens, each.load.num_decoding)
            for each in self.router.fleet()
        }

    def _events(self, name: str, epoch: int, events: list) -> None:
        seq = self._next_seq[name]
        self._next_seq[name] = seq + 1
        assert self.router.macs.apply_events(name, epoch, seq, events) is Applied.OK


def set_speed(speed, tokens_per_s: float) -> None:
    from cluster.routing.speed import StepCosts

    speed.num_observed = 5
    speed.costs = StepCosts(0.0, 1.0 / tokens_per_s, 0.0, 0.0, 0.0)


def prefill_sample(num_tokens: int, seconds: float) -> StepSample:
    return StepSample(num_tokens, num_tokens / 2, 0, 0, seconds)


def prompt_of(*parts: tuple[int, int]) -> list[int]:
    """Parts as (content, num_tokens): equal contents give equal tokens."""
    return [1_000 * content + position for content, length in parts for position in range(length)]


def hashes_of(prompt: Sequence[int]) -> list[BlockHash]:
    return hash_blocks(ROOT, prompt, BLOCK_SIZE)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def make_fleet() -> Callable[..., Fleet]:
    return Fleet


@pytest.fixture(name="prompt_of")
def _prompt_of() -> Callable[..., list[int]]:
    return prompt_of


@pytest.fixture(name="hashes_of")
def _hashes_of() -> Callable[..., list[BlockHash]]:
    return hashes_of


@pytest.fixture(name="prefill_sample")
def _prefill_sample() -> Callable[..., StepSample]:
    return prefill_sample
