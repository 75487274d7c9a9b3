"""When the requests of a trace arrive: its own moments, scaled and spread."""

import random
from dataclasses import replace

from cluster.simulation.trace import Trace, TraceRequest


def scaled(trace: Trace, rate: float) -> Trace:
    """The same requests, `rate` times as many a second. Pauses of clients between two requests stay as they are."""
    return _moved(trace, [request.at_s / rate for request in trace.requests])


def jittered(trace: Trace, spread_s: float, seed: int) -> Trace:
    """Each arrival up to so much later, for traces whose clock is coarse."""
    rng = random.Random(f"{seed}-jitter")
    return _moved(trace, [request.at_s + rng.uniform(0, spread_s) for request in trace.requests])


def with_pauses(trace: Trace, longest_s: float) -> Trace:
    """Clients that wait no longer than this between an answer and their next request: nobody sleeps."""
    requests = tuple(replace(request, delay_s=min(request.delay_s, longest_s)) for request in trace.requests)
    return replace(trace, requests=requests)


def started(trace: Trace, starts_per_s: float, seed: int) -> Trace:
    """Sessions start in random order, so many a second, as a Poisson process."""
    rng = random.Random(f"{seed}-starts")
    sessions = sorted({request.session for request in trace.requests})
    rng.shuffle(sessions)
    start_s, moment_s = {}, 0.0
    for session in sessions:
        start_s[session] = moment_s
        moment_s += rng.expovariate(starts_per_s)
    first_s: dict[int, float] = {}
    for request in trace.requests:
        first_s.setdefault(request.session, request.at_s)
    return _moved(trace, [start_s[r.session] + r.at_s - first_s[r.session] for r in trace.requests])


def _moved(trace: Trace, moments_s: list[float]) -> Trace:
    """In the order of the new moments, predecessors before their successors."""
    order = sorted(range(len(moments_s)), key=moments_s.__getitem__)
    position = {index: new for new, index in enumerate(order)}

    def moved(index: int) -> TraceRequest:
        request = trace.requests[index]
        after = None if request.after is None else position[request.after]
        return replace(request, at_s=moments_s[index], after=after)

    return replace(trace, requests=tuple(map(moved, order)))
