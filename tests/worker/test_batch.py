"""Packing against a brute-force twin."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.batch import Batch, Span

_MAX_BLOCKS = 40


@st.composite
def _spans(draw):
    """Spans of distinct sequences with disjoint random block tables."""
    size = draw(st.sampled_from((1, 4, 16)))
    count = draw(st.integers(1, 8))
    ids = draw(st.permutations(range(1, count * _MAX_BLOCKS + 1)))
    spans = []
    for index in range(count):
        num_tokens = draw(st.one_of(st.just(1), st.integers(1, 2 * size + 1)))
        start = draw(st.integers(0, _MAX_BLOCKS * size - num_tokens))
        tokens = draw(st.lists(st.integers(0, 999), min_size=num_tokens, max_size=num_tokens))
        table = ids[index * _MAX_BLOCKS : (index + 1) * _MAX_BLOCKS]
        spans.append(Span(tokens, start, list(table), draw(st.booleans())))
    return size, spans


@settings(max_examples=150, deadline=None)
@given(_spans())
def test_every_token_has_its_own_slot_position_and_id(case):
    """The packed arrays are the spans, in the order that the batch names."""
    size, spans = case
    batch = Batch(spans, block_size=size)
    ordered = [spans[i] for i in batch.order]
    assert sorted(batch.order) == list(range(len(spans)))
    lengths = [len(span.token_ids) for span in ordered]
    assert all(length == 1 for length in lengths[: batch.num_decodes])
    assert all(length > 1 for length in lengths[batch.num_decodes :])
    expected = [
        (token, position, span.block_table[position // size], position % size)
        for span in ordered
        for token, position in zip(span.token_ids, range(span.start, span.end), strict=True)
    ]
    assert np.array(batch.tokens).ravel().tolist() == [token for token, *_ in expected]
    assert batch.rows.block_ids.tolist() == [block for _, _, block, _ in expected]
    assert batch.rows.block_offsets.tolist() == [offset for *_, offset in expected]
    if len(spans) > 1:
        assert np.array(batch.offset).tolist() == [position for _, position, *_ in expected]
    assert batch.rows.slots.slots.tolist() == [block * size + offset for _, _, block, offset in expected]
    ends = np.cumsum(lengths)
    assert batch.sampled_rows == [end - 1 for end, span in zip(ends, ordered, strict=True) if span.samples]


@settings(max_examples=150, deadline=None)
@given(_spans())
def test_each_decode_row_sees_its_own_context_and_nothing_else(case):
    """Gathered slots where the mask allows: exactly positions 0 to its own, in order."""
    size, spans = case
    batch = Batch(spans, block_size=size)
    seen = 0
    for group in batch.decode_groups:
        index = np.array(group.gather_index(2))
        for row in range(group.first, group.last):
            span = batch.spans[row]
            slots = [(pool_row, offset) for pool_row in index[row - group.first, 1] for offset in range(size)]
            allowed = [True] * len(slots) if group.mask is None else np.array(group.mask)[row - group.first, 0, 0]
            visible = [slot for slot, is_seen in zip(slots, allowed, strict=True) if is_seen]
            assert visible == [(span.block_table[p // size] * 2 + 1, p % size) for p in range(span.end)]
            seen += 1
    assert seen == batch.num_decodes


@settings(max_examples=100, deadline=None)
@given(_spans())
def test_padding_of_a_decode_group_is_bounded(case):
    """Beyond 16 blocks the longest table of a group has less than twice the blocks of the shortest."""
    size, spans = case
    for group in Batch(spans, block_size=size).decode_groups:
        blocks = -(-group.context_lens // size)
        assert blocks.max() < 2 * max(blocks.min(), 8)


@settings(max_examples=50, deadline=None)
@given(_spans())
def test_decode_rows_for_a_ragged_kernel_form_one_group(case):
    """It reads each row's own table and length."""
    size, spans = case
    batch = Batch(spans, block_size=size, decodes_together=True)
    assert [(group.first, group.last) for group in batch.decode_groups] == [(0, batch.num_decodes)] * (
        batch.num_decodes > 0
    )
    for group in batch.decode_groups:
        assert group.context_lens.tolist() == [span.end for span in batch.spans[: group.last]]


@settings(max_examples=100, deadline=None)
@given(_spans())
def test_prefill_spans_cover_their_rows_and_their_whole_context(case):
    size, spans = case
    batch = Batch(spans, block_size=size)
    first = batch.num_decodes
    for prefill, span in zip(batch.prefills, batch.spans[batch.num_decodes :], strict=True):
        assert (prefill.first, prefill.last) == (first, first + len(span.token_ids))
        assert (prefill.start, prefill.end) == (span.start, span.end)
        blocks = span.block_table[: -(-span.end // size)]
        assert np.array(prefill.gather_index(1)).ravel().tolist() == blocks
        first = prefill.last
    assert first == batch.num_tokens
