"""How many guessed tokens may run behind a request's next row."""

from cluster.scheduling.live import LiveRequest


def max_drafts(live: LiveRequest, most: int, num_spare_rows: int, state_block_size: int) -> int:
    """At most `most`, as many as the worker wants, and none beyond the answer's length.

    With recurrent states, whose blocks have `state_block_size` tokens (else 0), none beyond the end of a block: when
    the token behind it is drawn, all tokens before it are in the state, which can be kept.
    """
    start = live.num_planned
    num_drafts = min(live.num_wanted_drafts, most, num_spare_rows, live.max_length - start - 2)
    if state_block_size:
        num_drafts = min(num_drafts, state_block_size - 1 - start % state_block_size)
    return max(0, num_drafts)
