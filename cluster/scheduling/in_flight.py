"""Plans whose results have not come yet."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.scheduling.errors import ProtocolError
from cluster.scheduling.plan import StepPlan, StepResult, by_sequence
from cluster.scheduling.step_builder import Checkpoint


@dataclass(frozen=True, slots=True)
class PlanInFlight:
    """What is assumed of a plan until its result comes."""

    step_id: int
    num_tokens: int
    # Of them, those of prompts.
    num_prefill_tokens: int
    # One past the last position, by sequence, of each slice that does not sample.
    ends: Mapping[int, int]
    # Drafts allowed, by sequence, of each slice that samples.
    max_drafts: Mapping[int, int]
    checkpoints: tuple[Checkpoint, ...]


class PlansInFlight:
    """In the order of their execution; step ids rise by one with each plan."""

    def __init__(self) -> None:
        self._plans: deque[PlanInFlight] = deque()
        self.next_step_id = 1
        # Results of plans before this one are of a worker that was lost.
        self._first_valid_id = 1

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def first_step_id(self) -> int:
        """Of the oldest plan in flight, or of the next one if there is none."""
        return self._plans[0].step_id if self._plans else self.next_step_id

    @property
    def has_drafts(self) -> bool:
        """Whether a plan allows drafts, so that nobody knows how far it will get."""
        return any(any(plan.max_drafts.values()) for plan in self._plans)

    def push(self, plan: StepPlan, checkpoints: tuple[Checkpoint, ...], num_prefill_tokens: int) -> None:
        """The plan goes to the worker; so many of its tokens are of prompts."""
        self.next_step_id += 1
        self._plans.append(
            PlanInFlight(
                plan.step_id,
                num_tokens=sum(s.num_tokens for s in plan.slices),
                num_prefill_tokens=num_prefill_tokens,
                ends={s.seq_id: s.start + s.num_tokens for s in plan.slices if not s.samples},
                max_drafts={s.seq_id: s.max_drafts for s in plan.slices if s.samples},
                checkpoints=checkpoints,
            )
        )

    def take(self, result: StepResult) -> PlanInFlight | None:
        """The oldest plan, whose result this is; None if a lost worker made it.

        Raises ProtocolError, with nothing changed, if it can't be that plan's.
        """
        if result.step_id < self._first_valid_id:
            return None
        if not self._plans or self._plans[0].step_id != result.step_id:
            expected = self._plans[0].step_id if self._plans else None
            raise ProtocolError(f"got the result of step {result.step_id}, expected {expected}")
        plan = self._plans[0]
        # A row is skipped only after a stop token, so it would have sampled.
        num_sampled = len({sampled.seq_id for sampled in result.sampled})
        if num_sampled + len(result.skipped_seq_ids) != len(plan.max_drafts):
            raise ProtocolError(
                f"step {result.step_id} sampled for {num_sampled} sequences and skipped "
                f"{len(result.skipped_seq_ids)}, expected {len(plan.max_drafts)} in sum"
            )
        for seq_id, sampled in by_sequence(result.sampled).items():
            most = 1 + plan.max_drafts.get(seq_id, 0)
            if len(sampled) > most:
                problem = f"sampled {len(sampled)} tokens of sequence {seq_id}, which has room for {most}"
                raise ProtocolError(f"step {result.step_id} {problem}")
        return self._plans.popleft()

    def forget(self) -> None:
        """The worker is lost: no result of these will count."""
        self._plans.clear()
        self._first_valid_id = self.next_step_id
