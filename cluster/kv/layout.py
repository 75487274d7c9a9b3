"""The cut of a model's KV memory into groups and pools, and what a sequence needs of it.

`KVLayout.num_blocks_for` is the one place that says what a sequence needs; start-up sizing and admission both ask it.
"""

from dataclasses import dataclass

from cluster.kv.spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVSpec,
    MLASpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table: block id b of the group is block b in each of them.

    A block holds `block_size` tokens of every layer, or one state of every layer if the spec is recurrent. Layers of
    one group need the same tokens; their widths may differ, and `spec` is that of the first.
    """

    group_id: int
    pool_id: int
    spec: KVSpec
    layer_indices: tuple[int, ...]
    page_bytes: int

    @property
    def is_state(self) -> bool:
        """Whether its blocks are states instead of tokens."""
        return isinstance(self.spec, RecurrentStateSpec)

    @property
    def is_full(self) -> bool:
        """Whether every past token is kept."""
        return isinstance(self.spec, FullAttentionSpec | MLASpec)


@dataclass(frozen=True, slots=True)
class KVPool:
    """Blocks of one size in bytes. `num_blocks` counts the null block, and is where the split starts."""

    pool_id: int
    page_bytes: int
    group_ids: tuple[int, ...]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How the KV memory of one model is cut.

    `max_in_flight_tokens` is how many tokens of a sequence may have been planned and not processed yet: windows keep
    their blocks for so much longer.
    """

    block_size: int
    groups: tuple[KVGroup, ...]
    pools: tuple[KVPool, ...]
    budget_bytes: int
    max_model_len: int
    max_in_flight_tokens: int = 0

    def num_group_blocks_for(self, group: KVGroup, num_tokens: int) -> int:
        """The most blocks of one group that a sequence holds on its way to a length of `num_tokens` tokens.

        The newest token has been sampled but not run, so its KV is not there yet.
        """
        num_kept = num_tokens - 1
        spec = group.spec
        if isinstance(spec, RecurrentStateSpec):
            return 1
        num_blocks = -(-num_kept // self.block_size)
        if isinstance(spec, SlidingWindowSpec):
            # The window of the last block end is kept too: there the sequence can be resumed.
            window_tokens = spec.window + self.block_size - 2 + self.max_in_flight_tokens
            num_sinks = -(-spec.num_sink_tokens // self.block_size)
            return min(num_blocks, num_sinks + -(-window_tokens // self.block_size) + 1)
        if isinstance(spec, ChunkedLocalSpec):
            return min(
                num_blocks, -(-(spec.chunk + self.block_size - 1 + self.max_in_flight_tokens) // self.block_size) + 1
            )
        return num_blocks

    def num_blocks_for(self, num_tokens: int) -> tuple[int, ...]:
        """The most blocks of each pool that a sequence holds on its way to `num_tokens` tokens."""
        return tuple(
            sum(self.num_group_blocks_for(self.groups[group_id], num_tokens) for group_id in pool.group_ids)
            for pool in self.pools
        )

    def bytes_for(self, num_tokens: int) -> int:
        """The most bytes that a sequence holds on its way to `num_tokens` tokens."""
        blocks = self.num_blocks_for(num_tokens)
        return sum(n * pool.page_bytes for n, pool in zip(blocks, self.pools, strict=True))

    @property
    def usable_bytes(self) -> int:
        """What sequences can hold: the budget less a null block a pool."""
        return self.budget_bytes - sum(pool.page_bytes for pool in self.pools)

    @property
    def max_concurrency(self) -> float:
        """Sequences of max_model_len tokens that fit at once, wherever the pools' boundaries lie."""
        return self.usable_bytes / self.bytes_for(self.max_model_len)

    @property
    def token_capacity(self) -> int:
        """Tokens that fit at once, in sequences of max_model_len."""
        return int(self.max_concurrency * self.max_model_len)
