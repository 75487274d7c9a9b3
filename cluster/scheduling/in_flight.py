"""Plans whose results have not come yet."""

from collections import deque
from dataclasses import dataclass

from cluster.scheduling.errors import ProtocolError
from cluster.scheduling.plan import StepPlan, StepResult
from cluster.scheduling.step_builder import Checkpoint


@dataclass(frozen=True, slots=True)
class PlanInFlight:
    """What is assumed of a plan until its result comes."""

    step_id: int
    num_samples: int
    num_tokens: int
    # (seq_id, one past its last position) of each row.
    ends: tuple[tuple[int, int], ...]
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

    def push(self, plan: StepPlan, checkpoints: tuple[Checkpoint, ...]) -> None:
        """The plan goes to the worker."""
        self.next_step_id += 1
        self._plans.append(
            PlanInFlight(
                plan.step_id,
                num_samples=sum(s.samples for s in plan.slices),
                num_tokens=sum(s.num_tokens for s in plan.slices),
                ends=tuple((s.seq_id, s.start + s.num_tokens) for s in plan.slices),
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
        num_answers = len(result.sampled) + len(result.skipped_seq_ids)
        if num_answers != plan.num_samples:
            raise ProtocolError(
                f"step {result.step_id} sampled {len(result.sampled)} tokens and skipped "
                f"{len(result.skipped_seq_ids)} rows, expected {plan.num_samples} in sum"
            )
        return self._plans.popleft()

    def forget(self) -> None:
        """The worker is lost: no result of these will count."""
        self._plans.clear()
        self._first_valid_id = self.next_step_id
