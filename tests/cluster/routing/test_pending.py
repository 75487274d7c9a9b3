"""Prompts under way: a radix tree against plain lists of chains."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.kv.hashing import BlockHash, hash_block
from cluster.routing.pending import PendingChains, PendingNode

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


def chain(tokens: list[int]) -> list[BlockHash]:
    hashes, parent = [], BlockHash(bytes(16))
    for token in tokens:
        parent = hash_block(parent, [token])
        hashes.append(parent)
    return hashes


def num_common(left: list[BlockHash], right: list[BlockHash]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


class PendingMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.pending = PendingChains()
        self.chains: list[tuple[int, list[BlockHash], PendingNode]] = []

    @rule(slot=st.integers(0, 3), tokens=TOKENS)
    def add(self, slot: int, tokens: list[int]) -> None:
        hashes = chain(tokens)
        self.chains.append((slot, hashes, self.pending.add(slot, hashes)))

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        if self.chains:
            slot, _, node = self.chains.pop(data.draw(st.integers(0, len(self.chains) - 1)))
            self.pending.discard(slot, node)

    @rule(tokens=TOKENS, macs=st.integers(0, 15))
    def match(self, tokens: list[int], macs: int) -> None:
        hashes = chain(tokens)
        expected = {}
        for slot, each, _ in self.chains:
            if macs >> slot & 1:
                expected[slot] = max(expected.get(slot, 0), num_common(each, hashes))
        found = {}
        for mask, depth in self.pending.match(hashes, macs):
            for slot in range(4):
                if mask >> slot & 1:
                    assert slot not in found
                    found[slot] = depth
        assert found == {slot: depth for slot, depth in expected.items() if depth}

    @invariant()
    def fits_together(self) -> None:
        if not hasattr(self, "pending"):
            return
        ends: dict[int, dict[PendingNode, int]] = {}
        for slot, _, node in self.chains:
            of_slot = ends.setdefault(slot, {})
            of_slot[node] = of_slot.get(node, 0) + 1
        self.pending.check(ends)
        assert bool(self.pending) == bool(self.chains)


TestPendingMachine = PendingMachine.TestCase
TestPendingMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
