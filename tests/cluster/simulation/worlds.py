"""Small traces made on the spot, as the readers would give them."""

import random
from array import array
from collections.abc import Sequence

from cluster.kv.spec import FullAttentionSpec, LayerSpec
from cluster.simulation.cost_model import CostModel
from cluster.simulation.fleet import FleetSpec, Limits, MacSpec, uniform_fleet
from cluster.simulation.trace import BlockChains, Trace, TraceRequest

BLOCK_SIZE = 16
TINY: tuple[LayerSpec, ...] = (FullAttentionSpec(num_kv_heads=1, head_dim=8),)
TOKEN_BYTES = 32


def trace_of(requests: Sequence[tuple[float, int, int, Sequence[object]]], block_size: int = BLOCK_SIZE) -> Trace:
    """(arrival, prompt tokens, output tokens, names of full blocks) each."""
    chains, made = BlockChains(), []
    for session, (at_s, num_prompt, num_output, names) in enumerate(requests):
        blocks = array("I")
        chains.extend(blocks, names)
        made.append(TraceRequest(session, at_s, num_prompt, num_output, blocks))
    return Trace("made", block_size, tuple(made), chains)


def conversations(seed: int, num_sessions: int = 12, num_turns: int = 4, closed: bool = False) -> Trace:
    """Chats over one system prompt of two blocks; every turn goes on with the answer before it."""
    rng = random.Random(seed)
    chains, made = BlockChains(), []
    for session in range(num_sessions):
        at_s, num_tokens, after = rng.uniform(0, 20), 2 * BLOCK_SIZE, None
        for turn in range(num_turns):
            num_prompt = num_tokens + rng.randint(1, 80)
            num_output = rng.randint(1, 40)
            num_tokens = num_prompt + num_output
            names: list[object] = ["s0", "s1", *((session, i) for i in range(2, num_tokens // BLOCK_SIZE))]
            blocks = array("I")
            chains.extend(blocks, names)
            made.append((at_s, session, turn, num_prompt, num_output, blocks))
            at_s += rng.uniform(1, 10)
    made.sort(key=lambda each: each[:3])
    position: dict[tuple[int, int], int] = {}
    requests = []
    for index, (at_s, session, turn, num_prompt, num_output, blocks) in enumerate(made):
        position[session, turn] = index
        after = position.get((session, turn - 1)) if closed else None
        requests.append(TraceRequest(session, at_s, num_prompt, num_output, blocks, after=after, delay_s=1.0))
    return Trace("conversations", BLOCK_SIZE, tuple(requests), chains)


def tiny_fleet(num_macs: int, num_tokens: int = 4000, layers: tuple[LayerSpec, ...] = TINY, **limits: int) -> FleetSpec:
    """Macs with a cache of so many tokens of the tiny model."""
    bounds = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_chunk_tokens": 32} | limits
    costs = CostModel(1000.0, step_s=0.01)
    mac = MacSpec("mac", costs, num_tokens * TOKEN_BYTES, Limits(**bounds))
    return uniform_fleet(num_macs, mac, layers=layers, max_model_len=1000)
