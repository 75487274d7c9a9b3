"""What a simulated fleet is asked: requests with their lengths and the content of their blocks, but no tokens."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from cluster.kv.hashing import HASH_BYTES, BlockHash

# What a client would ask for at the most, where the trace does not say.
DEFAULT_MAX_TOKENS = 4096


class BlockChains:
    """Numbers for block contents: equal exactly if the block and all before it are equal."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, object], int] = {}
        self._hashes: list[BlockHash] = []

    def extend(self, blocks: "array[int]", keys: Sequence[object]) -> None:
        """Appends the numbers of blocks named by `keys`, which go on from those that are there."""
        nodes, parent = self._nodes, blocks[-1] if blocks else -1
        for key in keys:
            node = nodes.get((parent, key))
            if node is None:
                node = nodes[parent, key] = len(self._hashes)
                self._hashes.append(_hash(b"block", node))
            blocks.append(node)
            parent = node

    def hashes(self, blocks: Sequence[int]) -> tuple[BlockHash, ...]:
        """Their hashes."""
        return tuple(map(self._hashes.__getitem__, blocks))


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    `blocks` are the numbers of the full blocks of prompt and answer, as far as they are known; other blocks of the
    answer are nobody else's. It arrives at `at_s`; if `after` is given, `delay_s` after the end of that request
    instead (the client read the answer before it went on).
    """

    session: int
    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: "array[int]"
    max_tokens: int = DEFAULT_MAX_TOKENS
    after: int | None = None
    delay_s: float = 0.0
    # Token offsets inside the prompt where messages end.
    boundaries: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer."""
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their `at_s`; `after` is an index into them."""

    name: str
    block_size: int
    requests: tuple[TraceRequest, ...]
    chains: BlockChains = field(repr=False)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last one on record."""
        return self.requests[-1].at_s - self.requests[0].at_s if self.requests else 0.0

    @property
    def max_length(self) -> int:
        """Tokens of the longest request, its answer included."""
        return max((request.num_tokens for request in self.requests), default=0)

    def select(self, keeps: Callable[[TraceRequest], bool]) -> "Trace":
        """Those requests alone. One whose predecessor is left out arrives when the trace says."""
        position: dict[int, int] = {}
        kept: list[TraceRequest] = []
        for index, request in enumerate(self.requests):
            if keeps(request):
                position[index] = len(kept)
                after = None if request.after is None else position.get(request.after)
                kept.append(replace(request, after=after))
        return replace(self, requests=tuple(kept))

    def first(self, num_requests: int) -> "Trace":
        """The first requests alone; none of them comes after a later one."""
        return replace(self, requests=self.requests[:num_requests])

    def prompt_hashes(self, request: TraceRequest) -> tuple[BlockHash, ...]:
        """Of the prompt's full blocks."""
        return self.chains.hashes(request.blocks[: request.num_prompt_tokens // self.block_size])

    def all_hashes(self, index: int) -> tuple[BlockHash, ...]:
        """Of all full blocks of prompt and answer; blocks that the trace does not know get hashes of their own."""
        request = self.requests[index]
        known = self.chains.hashes(request.blocks)
        num_blocks = request.num_tokens // self.block_size
        return known + tuple(_hash(b"answer", index, i) for i in range(len(known), num_blocks))


def num_common(one: "array[int]", other: "array[int]") -> int:
    """Leading items that are equal. O(n log n), in C."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _hash(kind: bytes, *numbers: int) -> BlockHash:
    """Well mixed, because digests of sets are sums of hashes."""
    content = kind + b"".join(number.to_bytes(8, "little") for number in numbers)
    return BlockHash(blake2b(content, digest_size=HASH_BYTES).digest())
