"""What windows and chunks see, against a brute-force twin."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.batch import Batch, Span
from worker.kv_shapes import FULL_REACH, Reach, ReachKind

_MAX_BLOCKS = 40


def _sees(reach: Reach, query: int, key: int) -> bool:
    if key > query:
        return False
    if reach.kind is ReachKind.WINDOW:
        return query - key < reach.size
    return reach.kind is ReachKind.FULL or query // reach.size == key // reach.size


@st.composite
def _cases(draw):
    size = draw(st.sampled_from((1, 4, 16)))
    kind = draw(st.sampled_from(list(ReachKind)))
    reach = FULL_REACH if kind is ReachKind.FULL else Reach(kind, draw(st.integers(1, 3 * size + 2)))
    count = draw(st.integers(1, 6))
    ids = draw(st.permutations(range(1, count * _MAX_BLOCKS + 1)))
    spans = []
    for index in range(count):
        num_tokens = draw(st.one_of(st.just(1), st.integers(1, 2 * size + 1)))
        start = draw(st.integers(0, _MAX_BLOCKS * size - num_tokens))
        table = list(ids[index * _MAX_BLOCKS : (index + 1) * _MAX_BLOCKS])
        # What no token from `start` on sees has been given to somebody else.
        table[: reach.first_needed(start) // size] = [0] * (reach.first_needed(start) // size)
        spans.append(Span([0] * num_tokens, start, (), samples=True, tables=([], table)))
    return size, reach, spans


@settings(max_examples=200, deadline=None)
@given(_cases())
def test_rows_see_the_slots_within_reach_and_no_others(case):
    """In order, and never a block that was left behind."""
    size, reach, spans = case
    batch = Batch(spans, block_size=size)
    rows = batch.view(1, reach)
    assert batch.view(1, reach) is rows
    for group in rows.decode_groups:
        index = np.array(group.gather_index(1))[:, 0]
        for row in range(group.first, group.last):
            span = batch.spans[row]
            slots = [(block, offset) for block in index[row - group.first] for offset in range(size)]
            mask = [True] * len(slots) if group.mask is None else np.array(group.mask)[row - group.first, 0, 0]
            visible = [slot for slot, is_seen in zip(slots, mask, strict=True) if is_seen]
            table = span.tables[1]
            assert visible == [(table[p // size], p % size) for p in range(span.end) if _sees(reach, span.start, p)]
    for prefill, span in zip(rows.prefills, batch.spans[batch.num_decodes :], strict=True):
        blocks = np.array(prefill.gather_index(1)).ravel()
        assert 0 not in blocks
        keys = range(prefill.first_key, span.end)
        assert blocks.tolist() == list(span.tables[1][prefill.first_key // size : -(-span.end // size)])
        expected = [[_sees(reach, query, key) for key in keys] for query in range(span.start, span.end)]
        assert np.array(prefill.mask_array).tolist() == expected
        if isinstance(prefill.mask, str):
            assert expected == [[key <= query for key in keys] for query in range(span.start, span.end)]
    assert rows.block_ids.tolist() == [
        span.tables[1][p // size] for span in batch.spans for p in range(span.start, span.end)
    ]


@settings(max_examples=200, deadline=None)
@given(_cases(), st.data())
def test_rows_with_guesses_are_decode_rows_of_a_ragged_kernel(case, data):
    """In both layouts; the chunks are what is left, and every row is in one of them or decodes."""
    size, reach, spans = case
    for span in spans:
        span.num_drafts = data.draw(st.integers(0, len(span.token_ids) - 1))
    batch = Batch(spans, block_size=size, decodes_together=True)
    rows = batch.view(1, reach)
    span_of = [span for span in batch.spans for _ in span.token_ids]
    positions = [position for span in batch.spans for position in range(span.start, span.end)]
    verified = [row for row, span in enumerate(span_of) if 1 < len(span.token_ids) <= 1 + 2 * span.num_drafts]
    for shares_loads in (False, True):
        groups = rows.verify_groups(shares_loads=shares_loads)
        assert [row for group in groups for row in range(group.first, group.last)] == verified
        assert len(groups) == len({len(span_of[row].token_ids) for row in verified})
        for group in groups:
            assert len(group.block_tables) * group.rows_per_sequence == group.last - group.first
            for row in range(group.first, group.last):
                table = group.block_tables[(row - group.first) // group.rows_per_sequence]
                first, end = group.seen_ranges[row - group.first]
                expected = [p for p in range(span_of[row].end) if _sees(reach, positions[row], p)]
                assert [(table[at // size], at % size) for at in range(first, end)] == [
                    (span_of[row].tables[1][p // size], p % size) for p in expected
                ]
    decodes = range(batch.num_decodes)
    chunked = [row for chunk in rows.chunks for row in range(chunk.first, chunk.last)]
    assert [*decodes, *verified, *chunked] == list(range(batch.num_tokens))
    if rows.chunks:
        assert rows.prefill_rows.cu_queries == [*(chunk.first for chunk in rows.chunks), batch.num_tokens]
    assert Batch(spans, block_size=size).num_verified == 0, "plain MLX takes them as prefills"


@settings(max_examples=100, deadline=None)
@given(_cases())
def test_parts_cover_all_rows_and_never_mix_sequences_that_begin_with_others(case):
    _, _, spans = case
    batch = Batch(spans, block_size=case[0])
    row = 0
    assert [index for part in batch.parts for index in part.spans] == list(range(len(spans)))
    for part in batch.parts:
        assert part.first == row
        row = part.last
        members = [batch.spans[index] for index in part.spans]
        assert all((span.start == 0) == part.is_fresh for span in members)
        assert {len(span.token_ids) for span in members} == {part.num_tokens}
        assert len(members) * part.num_tokens == part.last - part.first
    assert row == batch.num_tokens


@pytest.mark.parametrize("reach", [Reach(ReachKind.WINDOW, 5), Reach(ReachKind.CHUNK, 5), FULL_REACH])
def test_mask_of_reach_is_what_each_position_sees(reach):
    queries, keys = np.arange(3, 17, dtype=np.int32), np.arange(17, dtype=np.int32)
    assert reach.mask(queries, keys).tolist() == [[_sees(reach, int(q), int(k)) for k in keys] for q in queries]
