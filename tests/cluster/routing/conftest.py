"""A router with Macs that are as easy to write down as the claims about them."""

from collections.abc import Callable, Sequence

import pytest

from cluster.kv.hashing import BlockHash, hash_blocks, root_hash
from cluster.routing.index import Applied
from cluster.routing.mac import MacInfo
from cluster.routing.policy import RoutingConfig
from cluster.routing.router import Decision, RouteQuery, Router

BLOCK_SIZE = 16
MODEL = "tiny"
ROOT = root_hash(model=MODEL, tokenizer="t", kv_format="f16", block_size=BLOCK_SIZE)
# 1,000 tokens a second and no cost of decoding: every predicted second below can be worked out in the head.
PLAIN = RoutingConfig(default_prefill_tokens_per_s=1_000.0, decode_slowdown_s=0.0, lease_s=60.0)


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
        }
        return MacInfo(**(values | changes))

    def add(self, *names: str, epoch: int = 1, holds: Sequence[BlockHash] = (), **changes: object) -> None:
        for name in names:
            self.router.join(self.info(name, epoch, **changes))
            assert self.router.load_snapshot(name, epoch, 0, [(0, each) for each in holds]) is Applied.OK
            self._next_seq[name] = 0

    def store(self, name: str, hashes: Sequence[BlockHash], epoch: int = 1) -> None:
        self._events(name, epoch, hashes, ())

    def remove(self, name: str, hashes: Sequence[BlockHash], epoch: int = 1) -> None:
        self._events(name, epoch, (), hashes)

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
        return RouteQuery(**(values | changes))

    def route(self, prompt: Sequence[int], request_id: str = "", **changes: object) -> Decision:
        decision = self.router.route(self.query(prompt, request_id, **changes), self.now_s)
        self.router.check()
        return decision

    def finish(self, decision: Decision, prompt: Sequence[int]) -> None:
        """The Mac computes the prompt, says so, and the request ends."""
        self.store(decision.mac, hashes_of(prompt), decision.epoch)
        self.router.first_token(decision.request_id)
        self.router.release(decision.request_id)
        self.router.check()

    def loads(self) -> dict[str, tuple[int, int, int]]:
        return {
            each.info.name: (each.load.num_requests, each.load.num_prefill_tokens, each.load.num_decoding)
            for each in self.router.fleet()
        }

    def _events(self, name: str, epoch: int, stored: Sequence[BlockHash], removed: Sequence[BlockHash]) -> None:
        seq = self._next_seq[name]
        self._next_seq[name] = seq + 1
        applied = self.router.apply_events(name, epoch, seq, [(0, h) for h in stored], [(0, h) for h in removed])
        assert applied is Applied.OK


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
