"""Why a place is worth resuming at, and how often requests then do resume just there."""

from enum import IntEnum

from cluster.kv.prefix_tree import Segment

# Points passed so often or more count as one class.
_NUM_PASSES = 4
# Beliefs count as so many observations.
_WEIGHT = 4.0

# Belief in how often a returning prefix is found cut.
_CUT_BELIEF = 0.1


class PointKind(IntEnum):
    """Where a resume point comes from; of several at one place the greatest counts."""

    # On the way of a long prefill: nobody stops there but who finds the rest evicted.
    INTERVAL = 0
    # A later message ended.
    MESSAGE = 1
    PROMPT_END = 2
    # The generation ended.
    TURN_END = 3
    # The first message ended: tools and system prompt, which other conversations have too.
    HEAD = 4
    # Two prompts parted.
    PARTING = 5


# Belief in how often a use of what lies at or below a point stops there.
_BELIEFS = {
    PointKind.INTERVAL: 0.01,
    PointKind.MESSAGE: 0.1,
    PointKind.PROMPT_END: 0.1,
    PointKind.TURN_END: 0.1,
    PointKind.HEAD: 0.5,
    PointKind.PARTING: 0.5,
}


class StopModel:
    """How likely a use of what lies at or below an inner point stops there, because requests part at it.

    As long as none has parted at the very point, that is learned from all points of its kind that have been passed as
    often. Besides, a use stops there if what goes on has been evicted meanwhile, but not the point: as often as
    returning prefixes are found cut at all, times the chance that the cut falls before the next point. How deep a cut
    goes is taken to have no scale: it falls between two lengths by the share in which they differ.
    """

    def __init__(self) -> None:
        self._num_uses = [[_WEIGHT] * _NUM_PASSES for _ in PointKind]
        self._num_stops = [[_BELIEFS[kind] * _WEIGHT] * _NUM_PASSES for kind in PointKind]
        self._num_returns, self._num_cuts = _WEIGHT, _CUT_BELIEF * _WEIGHT

    def observe(self, segment: Segment, *, is_stop: bool) -> None:
        """A request used what lies at or below a point."""
        if segment.is_point and not segment.num_stops:
            seen = min(segment.num_passes, _NUM_PASSES - 1)
            self._num_uses[segment.kind][seen] += 1
            self._num_stops[segment.kind][seen] += is_stop
        segment.num_stops += is_stop
        segment.num_passes += not is_stop

    def observe_return(self, *, is_cut: bool) -> None:
        """A request went on where one had ended; or it would have, had the end not been evicted."""
        self._num_returns += 1
        self._num_cuts += is_cut

    def share(self, segment: Segment) -> float:
        """Of a point's uses, those that stop there. O(segments to the next point)."""
        return min(1.0, self._parting_share(segment) + self._cut_share(segment))

    def _parting_share(self, segment: Segment) -> float:
        if not segment.num_stops:
            return self.first_share(segment.kind, segment.num_passes)
        num_uses = segment.num_stops + segment.num_passes
        return (segment.num_stops + _BELIEFS[PointKind.MESSAGE] * _WEIGHT) / (num_uses + _WEIGHT)

    def _cut_share(self, segment: Segment) -> float:
        """Where several go on below, one of them is likely to be left."""
        if len(segment.children) != 1:
            return 0.0
        (below,) = segment.children.values()
        while len(below.children) == 1 and not below.is_point:
            (below,) = below.children.values()
        return self._num_cuts / self._num_returns * (below.end - segment.end) / below.end

    def first_share(self, kind: int, num_passes: int = 0) -> float:
        """Of a point at which none has parted yet."""
        seen = min(num_passes, _NUM_PASSES - 1)
        return self._num_stops[kind][seen] / self._num_uses[kind][seen]
