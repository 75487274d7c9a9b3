"""Rows sorted by adapter and put back, held against picking them one by one."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.adapter_rows import BASE, Groups, StepAdapters
from worker.batch import Batch, Span
from worker.errors import UnsupportedModelError

NAMES = st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=12)


@given(names=NAMES, known=st.sets(st.sampled_from(["a", "b", "c"])))
def test_a_cut_puts_every_entry_back_where_it_was(names, known):
    groups = Groups(names)
    assert groups.uniform == (names[0] if len(set(names)) == 1 else None)
    cut = groups.cut(known)
    assert groups.cut(known) is cut
    x = mx.arange(len(names))
    in_order = x[cut.order]
    for name, first, last in cut.parts:
        assert {names[int(at)] for at in np.array(in_order[first:last])} <= ({name} if name else set(names) - known)
    seen = [name for name, _, _ in cut.parts]
    assert len(seen) == len(set(seen))
    assert set(seen) - {BASE} == set(names) & known
    joined = mx.concatenate([in_order[first:last] for _, first, last in cut.parts])
    assert np.array(joined[cut.back]).tolist() == list(range(len(names)))


def span(tokens, adapter, samples=True, start=0):
    return Span(list(range(tokens)), start, [1, 2], samples, ([1, 2], [5]), adapter=adapter)


def test_arrangements_are_told_apart_by_their_length():
    batch = Batch([span(1, "a", start=3), span(4, "b"), span(4, "", samples=False)], block_size=16)
    adapters = StepAdapters.of(batch)
    assert adapters is not None
    assert adapters.groups(9).names == [each.adapter for each in batch.spans for _ in each.token_ids]
    assert sorted(adapters.groups(2).names) == ["a", "b"]
    with pytest.raises(UnsupportedModelError, match="sees 5 entries"):
        adapters.groups(5)
    decodes, prefills = batch.parts
    with adapters.within(prefills):
        names = [batch.spans[index].adapter for index in prefills.spans]
        assert adapters.groups(2).names == names
        assert adapters.groups(8).names == [name for name in names for _ in range(4)]
        with pytest.raises(UnsupportedModelError):
            adapters.groups(9)
    with adapters.within(decodes):
        assert adapters.groups(1).uniform == "a"
    with adapters.only("b"):
        assert adapters.groups(77).uniform == "b"
    assert adapters.groups(9).uniform is None


def test_a_step_of_one_adapter_needs_no_arrangement():
    adapters = StepAdapters.of(Batch([span(3, "a"), span(1, "a")], block_size=16))
    assert adapters is not None
    assert adapters.groups(12345).uniform == "a"


def test_a_step_without_adapters_has_none():
    assert StepAdapters.of(Batch([span(3, ""), span(1, "")], block_size=16)) is None
