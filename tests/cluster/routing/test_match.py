"""Where prompts can be resumed: all Macs in one pass, against the rule of one Mac applied to each."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.kv.events import BlocksStored
from cluster.kv.group_managers import make_manager
from cluster.kv.hashing import BlockHash, hash_blocks, join_hashes, root_hash
from cluster.kv.layout import KVGroup
from cluster.kv.manager import KVCacheManager
from cluster.kv.planner import plan_layout
from cluster.kv.points import PointKind
from cluster.kv.spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    LayerSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    StateTensor,
)
from cluster.routing.index import PrefixIndex
from cluster.routing.match import leading_runs

SIZE = 16
FULL = FullAttentionSpec(1, 8)
WINDOW = SlidingWindowSpec(1, 8, 40)
SINKS = SlidingWindowSpec(1, 8, 33, num_sink_tokens=17)
CHUNK = ChunkedLocalSpec(1, 8, 64)
STATE = RecurrentStateSpec("mamba", (StateTensor((64,), 2),))
MODELS: dict[str, list[LayerSpec]] = {
    "full": [FULL],
    "two full": [FULL, FullAttentionSpec(3, 8)],
    "window": [FULL, WINDOW],
    "sinks": [FULL, SINKS],
    "chunk": [FULL, CHUNK],
    "state": [FULL, STATE],
    "all": [FULL, WINDOW, CHUNK, STATE],
    "window alone": [WINDOW],
    "state alone": [STATE],
}


def groups_of(specs: list[LayerSpec]) -> tuple[KVGroup, ...]:
    return tuple(KVGroup(number, 0, spec, (number,), 64) for number, spec in enumerate(specs))  # type: ignore[arg-type]


def chain(length: int, start: int = 0) -> list[BlockHash]:
    return [BlockHash((start + number).to_bytes(16, "big")) for number in range(length)]


def resumable_tokens(groups: tuple[KVGroup, ...], present: list[bytes], num_tokens: int) -> int:
    """One Mac, as HybridKVCacheCoordinator does it: each group lowers the length until none does."""
    managers = [make_manager(group, SIZE) for group in groups]
    num_blocks = len(present[0])
    matched = num_blocks
    for manager in managers:
        if manager.is_full:
            hole = present[manager.group_id].find(b"\x00")
            matched = min(matched, num_blocks if hole < 0 else hole)
    partial = [manager for manager in managers if not manager.is_full]
    if matched * SIZE == num_tokens and matched == num_blocks and not any(manager.is_state for manager in managers):
        lowest = [present[m.group_id].find(b"\x00", m.first_needed(num_tokens - 1)) for m in partial]
        sinks = [present[m.group_id].find(b"\x00", 0, m.num_sink_blocks) for m in partial]
        if max([*lowest, *sinks], default=-1) < 0:
            return num_tokens - 1
    limit, is_settled = min(matched, (num_tokens - 1) // SIZE), False
    while not is_settled:
        is_settled = True
        for manager in partial:
            length = manager.longest_hit(present[manager.group_id], limit)
            if length < limit:
                limit, is_settled = length, False
    return limit * SIZE


@st.composite
def contents(draw: st.DrawFn, specs: list[LayerSpec], num_blocks: int) -> list[bytes]:
    """Full attention without holes; the other groups have their blocks anywhere below."""
    rows = []
    for spec in specs:
        if isinstance(spec, FullAttentionSpec):
            depth = draw(st.integers(0, num_blocks))
            rows.append(b"\x01" * depth + b"\x00" * (num_blocks - depth))
        else:
            missing = draw(st.sets(st.integers(0, max(0, num_blocks - 1)), max_size=4))
            rows.append(bytes(number not in missing for number in range(num_blocks)))
    return rows


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_equals_the_rule_of_one_mac_applied_to_each(model: str, data: st.DataObject) -> None:
    specs = MODELS[model]
    groups, num_blocks = groups_of(specs), data.draw(st.integers(0, 14))
    num_tokens = num_blocks * SIZE + data.draw(st.integers(0 if num_blocks else 1, SIZE - 1))
    hashes = chain(num_blocks)
    index = PrefixIndex(groups, SIZE)
    macs = data.draw(st.lists(contents(specs, num_blocks), max_size=5))
    expected = {}
    for slot, present in enumerate(macs):
        index.open(slot)
        held = [b"".join(h for h, is_there in zip(hashes, row, strict=True) if is_there) for row in present]
        index.load(slot, 0, held)
        expected[slot] = resumable_tokens(groups, present, num_tokens)
    index.check()
    every = (1 << len(macs)) - 1
    match = index.match(hashes, num_tokens, every)
    found = {slot: sum(t for mask, t in match.resumable if mask >> slot & 1) for slot in range(len(macs))}
    assert found == expected
    masks = [mask for mask, _ in match.resumable]
    assert sum(masks) == sum(1 << slot for slot in range(len(macs)) if any(mask >> slot & 1 for mask in masks))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=40), st.integers(0, 30))
def test_galloping_equals_a_plain_walk(depths: list[int], length: int) -> None:
    hashes = chain(length)
    masks = {each: sum(1 << mac for mac, depth in enumerate(depths) if depth > i) for i, each in enumerate(hashes)}
    runs = leading_runs(masks.get, hashes, -1)
    found = {mac: d for mask, d in runs for mac in range(len(depths)) if mask >> mac & 1}
    assert found == {mac: min(depth, length) for mac, depth in enumerate(depths) if min(depth, length)}
    assert [depth for _, depth in runs] == sorted({depth for _, depth in runs}, reverse=True)


def test_a_cold_prompt_costs_one_look_up_and_a_known_one_two() -> None:
    hashes, asked = chain(512), []
    masks = dict.fromkeys(hashes, 1)

    def get(block_hash: BlockHash, default: int) -> int:
        asked.append(block_hash)
        return masks.get(block_hash, default)

    assert leading_runs(get, chain(512, 10_000), -1) == []
    assert len(asked) == 1
    assert leading_runs(get, hashes, -1) == [(1, 512)]
    assert len(asked) == 3


class OneMac:
    """A real KV cache whose events feed the index."""

    def __init__(self, index: PrefixIndex, slot: int, specs: list[LayerSpec], num_blocks: int) -> None:
        pages = [s.state_bytes if isinstance(s, RecurrentStateSpec) else SIZE * FULL.token_bytes for s in specs]
        layout = plan_layout(specs, kv_budget_bytes=num_blocks * sum(pages), max_model_len=320, block_size=SIZE)
        self.kv = KVCacheManager(layout)
        self.index, self.slot, self.seq, self.num_run = index, slot, 0, 0
        index.open(slot)
        index.load(slot, 0, [b""] * len(layout.groups))

    def run(self, hashes: list[BlockHash], num_tokens: int, now_s: float) -> None:
        """One request of a prompt, in chunks of two blocks."""
        joined = join_hashes(hashes)
        computed = self.kv.get_computed_blocks(joined, num_tokens)
        if not self.kv.can_allocate(computed, num_tokens):
            return
        self.num_run += 1
        self.kv.start(self.num_run, computed, joined, now_s=now_s)
        self.kv.release_sources()
        done = computed.num_tokens
        while done < num_tokens:
            end = min(num_tokens, done - done % SIZE + 2 * SIZE)
            if self.kv.allocate(self.num_run, end, done) is None:
                break
            first = self.kv.num_registered_blocks(self.num_run)
            self.kv.register(self.num_run, first, joined[first * 16 : end // SIZE * 16])
            if end % SIZE == 0 and end // SIZE <= self.kv.num_registered_blocks(self.num_run):
                self.kv.checkpoint(self.num_run, end, PointKind.MESSAGE)
                self.kv.confirm_checkpoint(self.num_run, end)
            done = end
        self.kv.free(self.num_run, done)
        events = self.kv.take_events()
        if events:
            self.index.apply(self.slot, self.seq, events)
            self.seq += 1


@pytest.mark.parametrize("model", ["full", "window", "chunk", "state", "all", "state alone"])
@pytest.mark.parametrize("seed", range(3))
def test_predicts_what_real_kv_managers_find_under_eviction(model: str, seed: int) -> None:
    """Three Macs with little memory, sessions that grow and part; the index must say what each would find, always."""
    chance, specs = random.Random(seed), MODELS[model]
    groups = plan_layout(specs, kv_budget_bytes=1 << 20, max_model_len=1024, block_size=SIZE).groups
    index = PrefixIndex(groups, SIZE)
    macs = [OneMac(index, slot, specs, 25) for slot in range(3)]
    root = root_hash(model="m", tokenizer="t", kv_format="f", block_size=SIZE)
    sessions: list[list[int]] = [[1] * 64]
    num_hits = 0
    for step in range(150):
        tokens = chance.choice(sessions)[: chance.choice([None, None, 64, 96])]  # type: ignore[misc]
        tokens = tokens + [chance.randrange(1 << 16) for _ in range(chance.choice([0, 5, 16, 40]))]
        if len(tokens) < 300:
            sessions = [*sessions[-8:], tokens]
        hashes = hash_blocks(root, tokens, SIZE)
        match = index.match(hashes, len(tokens), 7)
        for mac in macs:
            found = mac.kv.get_computed_blocks(join_hashes(hashes), len(tokens)).num_tokens
            assert sum(t for mask, t in match.resumable if mask >> mac.slot & 1) == found, (step, mac.slot)
            num_hits += found > 0
        chance.choice(macs).run(hashes, len(tokens), float(step))
    for mac in macs:
        assert index.digests(mac.slot) == mac.kv.digests()
        assert all(each.num_evicted_ranked + each.num_evicted_left_behind for each in mac.kv.stats().groups)
    index.check()
    assert num_hits > 50


def test_a_mac_whose_state_was_evicted_is_not_credited() -> None:
    """Full attention resident, the state gone: the prompt has to run from the start there."""
    index = PrefixIndex(groups_of([FULL, STATE]), SIZE)
    hashes = chain(8)
    for slot, states in enumerate([hashes[7:], hashes[3:4], []]):
        index.open(slot)
        index.load(slot, 0, [b"".join(hashes), b"".join(states)])
    match = index.match(hashes, 8 * SIZE + 1, 7)
    assert sorted(match.resumable) == [(1, 128), (2, 64)]
    assert match.content == [(7, 8)]


def test_tells_which_group_lowered_a_mac() -> None:
    index = PrefixIndex(groups_of([FULL, STATE]), SIZE)
    hashes = chain(8)
    index.open(0)
    index.load(0, 0, [b"".join(hashes), hashes[3]])
    match = index.match(hashes, 8 * SIZE + 1, 1)
    assert match.lowered == [(1, 1, 8, 4)]


def test_stored_events_arrive_by_group() -> None:
    index = PrefixIndex(groups_of([FULL, WINDOW]), SIZE)
    hashes = chain(4)
    index.open(3)
    index.load(3, 0, [b"", b""])
    index.apply(3, 0, [BlocksStored(0, b"".join(hashes), None, 0), BlocksStored(1, b"".join(hashes[1:]), hashes[0], 1)])
    assert index.match(hashes, 65, -1).resumable == [(8, 64)]
    assert index.stats(3).num_blocks_by_group == (4, 3)


def test_looks_for_a_state_as_far_back_as_it_is() -> None:
    index = PrefixIndex(groups_of([FULL, STATE]), SIZE)
    hashes = chain(300)
    for slot, states in enumerate([hashes[9:10], hashes[229:230], []]):
        index.open(slot)
        index.load(slot, 0, [b"".join(hashes), b"".join(states)])
    assert sorted(index.match(hashes, 300 * SIZE + 1, 7).resumable) == [(1, 160), (2, 3_680)]


def test_a_state_at_the_very_first_block_is_found() -> None:
    index = PrefixIndex(groups_of([FULL, STATE]), SIZE)
    hashes = chain(6)
    index.open(0)
    index.load(0, 0, [b"".join(hashes), hashes[0]])
    assert index.match(hashes, 6 * SIZE + 1, 1).resumable == [(1, 16)]


@pytest.mark.parametrize("missing", [0, 1, 2, 5, 6, 7])
def test_sinks_and_window_must_both_be_there(missing: int) -> None:
    groups, hashes = groups_of([FULL, SINKS]), chain(8)
    index = PrefixIndex(groups, SIZE)
    index.open(0)
    index.load(0, 0, [b"".join(hashes), b"".join(h for at, h in enumerate(hashes) if at != missing)])
    present = [b"\x01" * 8, bytes(at != missing for at in range(8))]
    expected = resumable_tokens(groups, present, 8 * SIZE + 1)
    assert sum(tokens for _, tokens in index.match(hashes, 8 * SIZE + 1, 1).resumable) == expected
