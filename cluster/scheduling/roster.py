"""Who lives: waiting or running, by request id and by the worker's name; and what a request leaves when it stops.

Running ones are in order of admission. A seq_id is the worker's name for a request from one admission to the next: no
result of an earlier admission can mean a later one.
"""

from cluster.kv.manager import KVCacheManager
from cluster.scheduling.drain import DrainEstimate
from cluster.scheduling.in_flight import PlansInFlight
from cluster.scheduling.live import LiveRequest
from cluster.scheduling.waiting import WaitingQueue


class Roster:
    """Moves requests between waiting and running, and gives back their blocks."""

    def __init__(self, kv: KVCacheManager, in_flight: PlansInFlight) -> None:
        self._kv = kv
        self._in_flight = in_flight
        self.waiting: WaitingQueue[LiveRequest] = WaitingQueue()
        self.running: list[LiveRequest] = []
        self.by_id: dict[str, LiveRequest] = {}
        # Also holds the old seq_id of a preempted request, whose rows in flight still bring valid tokens.
        self.by_seq: dict[int, LiveRequest] = {}
        self.num_waiting_tokens = 0
        self.drain = DrainEstimate()
        # Of sequences that stopped since the last plan: it tells the worker.
        self.released_seq_ids: list[int] = []
        self.num_preemptions = 0
        # Of prompts, planned so far: the clock of their turns.
        self.num_prefilled_tokens = 0
        self._next_seq_id = 1

    def add(self, live: LiveRequest) -> None:
        """A new request waits."""
        live.came_at = self.num_prefilled_tokens
        self.by_id[live.request.request_id] = live
        self.waiting.push(live)
        self.num_waiting_tokens += live.cost_tokens

    def admit(self, live: LiveRequest, now_s: float) -> None:
        """It runs from now on, under a new name."""
        assert live.num_ahead == len(live.token_ids), "a token of it is still in flight"
        live.is_overdue |= self.waiting.admit(live, now_s)
        self.num_waiting_tokens -= live.cost_tokens
        self.by_seq.pop(live.seq_id, None)
        live.seq_id = self._next_seq_id
        self._next_seq_id += 1
        self.by_seq[live.seq_id] = live
        live.is_running = True
        self.running.append(live)

    def preempt(self, live: LiveRequest) -> None:
        """Take back a request's blocks; its tokens stay, and what is cached of it often does too."""
        self.running.remove(live)
        self._stop(live, is_settled=self.is_settled(live))
        self._wait_again(live)
        live.forget_progress()
        self.num_preemptions += 1

    def forget(self, live: LiveRequest, *, is_settled: bool) -> None:
        """A request has ended, wherever it is. Its tenant pays for what was used."""
        del self.by_id[live.request.request_id]
        self.by_seq.pop(live.seq_id, None)
        if live.is_running:
            self.running.remove(live)
            self._stop(live, is_settled=is_settled)
        else:
            self.waiting.remove(live)
            self.num_waiting_tokens -= live.cost_tokens
        if live.queue_s is not None:
            # The newest token was sampled and not run.
            num_used = max(live.num_run, live.num_planned) - live.num_cached_tokens
            self.drain.request_ended(num_used, live.cost_tokens)
            self.waiting.charge(live.tenant, num_used - live.cost_tokens, priority=live.priority, weight=live.weight)

    def worker_lost(self) -> None:
        """Running requests wait again, with the tokens that they have so far; their blocks are gone already."""
        for live in reversed(self.running):
            live.is_running = False
            self._wait_again(live)
        self.running.clear()
        for live in self.waiting:
            live.forget_progress()
            live.num_ahead = len(live.token_ids)
        self.by_seq.clear()
        self.released_seq_ids.clear()

    def is_settled(self, live: LiveRequest) -> bool:
        """Whether no plan in flight has a row of it."""
        return live.last_step_id < self._in_flight.first_step_id

    def check(self) -> None:
        """Assert that everyone is in one place, and found under the right names. O(requests)."""
        self.waiting.check()
        everyone = [*self.running, *self.waiting]
        assert sorted(map(id, everyone)) == sorted(map(id, self.by_id.values())), "a request is lost or doubled"
        assert self.num_waiting_tokens == sum(live.cost_tokens for live in self.waiting)
        for live in everyone:
            assert live.is_running == (live in self.running)
            if live.is_running:
                assert self.by_seq[live.seq_id] is live
            else:
                assert live.num_planned == live.num_processed == 0

    def _wait_again(self, live: LiveRequest) -> None:
        self.waiting.push_front(live)
        self.num_waiting_tokens += live.cost_tokens

    def _stop(self, live: LiveRequest, *, is_settled: bool) -> None:
        """Give back the blocks, and tell the worker with the next plan."""
        live.is_running = False
        self._kv.free(live.seq_id, live.num_processed, is_settled=is_settled)
        self.released_seq_ids.append(live.seq_id)
