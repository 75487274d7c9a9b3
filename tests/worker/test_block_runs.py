"""Attention over blocks where they lie gives what attention over their copy gives."""

import mlx.core as mx
import numpy as np
import pytest

from tests.golden.in_process import InProcessMac
from tests.golden.scenario import problems, reference
from tests.worker.families import config_of, make_model
from worker import block_runs
from worker.group_rows import DecodeGroup
from worker.metal import twins

pytestmark = pytest.mark.usefixtures("no_compile")

_SIZE, _DIM, _KV_HEADS = 16, 32, 2


def _group(table, num_keys):
    return DecodeGroup(0, 1, np.array([table], np.int32), np.array([num_keys], np.int32), _SIZE)


_TABLES = {
    "one run": range(7, 207),
    "two runs": [*range(300, 420), *range(1, 131)],
    "a run and single blocks": [*range(50, 170), 900, 3, 901, 5, 700, 6],
    "single blocks first": [900, 3, 901, 5, *range(50, 170)],
    "just long enough": range(1, 98),
}


@pytest.mark.parametrize("num_missing", [0, 1, 15])
@pytest.mark.parametrize("table", _TABLES.values(), ids=_TABLES)
def test_it_is_attention_over_the_gathered_blocks(table, num_missing):
    """Also with a last block that is not full, whose other slots hold no numbers."""
    table = list(table)
    pools = [mx.random.normal((1024, _KV_HEADS, _SIZE, _DIM), key=mx.random.key(seed)) for seed in (1, 2)]
    num_keys = len(table) * _SIZE - num_missing
    if num_missing:
        pools[0][table[-1], :, _SIZE - num_missing :] = mx.nan
        # Values are cleared when a block is begun.
        pools[1][table[-1], :, _SIZE - num_missing :] = 0
    keys, values = (pool.reshape(-1, _SIZE, _DIM) for pool in pools)
    queries = mx.random.normal((1, 6, 1, _DIM), key=mx.random.key(3))
    group = _group(table, num_keys)
    assert group.runs is not None
    ours = twins.paged_decode(queries, keys, values, group, _KV_HEADS, 0.3)
    seen = [pool[mx.array(table)].swapaxes(0, 1).reshape(1, _KV_HEADS, -1, _DIM)[:, :, :num_keys] for pool in pools]
    expected = mx.fast.scaled_dot_product_attention(queries, *seen, scale=0.3)
    assert mx.abs(ours - expected).max().item() < 1e-5


def test_short_or_scattered_contexts_are_gathered():
    assert block_runs.find_runs(np.arange(1, 97, dtype=np.int32)) is None
    assert block_runs.find_runs(np.arange(1, 800, 2, dtype=np.int32)) is None
    # Runs of chunks: a part each would cost more than a gather.
    chunks = np.concatenate([np.arange(first, first + 16) for first in range(1, 999, 40)])
    assert block_runs.find_runs(chunks.astype(np.int32)) is None


def test_a_long_answer_is_the_models_own():
    """Prompt and answer of one sequence lie in a row; its blocks are never copied."""
    model, config = make_model("qwen3"), config_of("qwen3")
    prompt = [int(token) for token in np.random.RandomState(0).randint(1, 300, 1700)]
    mac = InProcessMac(model, config, kv_budget_bytes=1 << 26, max_model_len=2048, max_chunk_tokens=64)
    answer = mac.add("a", prompt, 24)
    used = []
    decode = block_runs.decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_runs, "decode", lambda *args: used.append(args[3]) or decode(*args))
        mac.run()
    assert len(used) == 23 * config["num_hidden_layers"]
    assert problems(answer, reference(make_model("qwen3"), prompt, 24), 1e-4) == []
