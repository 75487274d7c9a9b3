"""Prometheus series of every Mac, made at each scrape from what the admin API says of the fleet."""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.cidery.v1 import admin_pb2


class _Fleet(Collector):
    def __init__(self, macs: Sequence[admin_pb2.Mac], *, is_router_up: bool) -> None:
        self._macs = macs
        self._is_router_up = is_router_up

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        yield GaugeMetricFamily("cidery_router_up", "Whether the router answers", value=self._is_router_up)
        yield from _of_router(self._macs)
        known = [mac for mac in self._macs if mac.HasField("kv_cache")]
        yield _gauge("cidery_mac_up", "Whether the Mac answers", [((m.name,), m in known) for m in self._macs])
        memory = [((m.name, state), value) for m in known for state, value in _bytes_by_state(m.kv_cache)]
        yield _gauge("cidery_kv_bytes", "KV memory by state; pinned is part of the others", memory, "state")
        running = [((m.name,), m.scheduling.num_running) for m in known]
        yield _gauge("cidery_mac_running", "Requests in the batch", running)
        waiting = [((m.name,), m.scheduling.num_waiting) for m in known]
        yield _gauge("cidery_mac_waiting", "Requests waiting", waiting)
        preemptions = [((m.name,), m.scheduling.num_preemptions) for m in known]
        yield _counter("cidery_mac_preemptions", "Requests preempted for want of KV memory", preemptions)
        drafted = [((m.name,), m.scheduling.num_drafted_tokens) for m in known]
        yield _counter("cidery_mac_drafted_tokens", "Tokens guessed and verified", drafted)
        accepted = [((m.name,), m.scheduling.num_accepted_tokens) for m in known]
        yield _counter("cidery_mac_accepted_tokens", "Generated tokens that had been guessed", accepted)
        failures = [((m.name, kernel), count) for m in known for kernel, count in sorted(m.kernel_failures.items())]
        text = "Starts of a worker at which a Metal kernel failed its self-test, and plain MLX ran in its place"
        yield _counter("cidery_mac_kernel_failures", text, failures, "kernel")
        groups = [((m.name, str(i), group.kind), group) for m in known for i, group in enumerate(m.kv_cache.groups)]
        labels = ("group", "kind")
        findable = [(names, group.findable_bytes) for names, group in groups]
        yield _gauge("cidery_kv_findable_bytes", "Cached blocks and states, held or not", findable, *labels)
        by_group = [((*names, state), size) for names, group in groups for state, size in _group_bytes(group)]
        yield _gauge("cidery_kv_group_bytes", "Bytes of a group by state", by_group, *labels, "state")
        pools = [((m.name, str(i)), pool) for m in known for i, pool in enumerate(m.kv_cache.pools)]
        by_pool = [((*names, state), size) for names, pool in pools for state, size in _pool_bytes(pool)]
        yield _gauge("cidery_kv_pool_bytes", "Bytes of a pool by state", by_pool, "pool", "state")
        queried = [(names, group.num_queried_tokens) for names, group in groups]
        yield _counter("cidery_kv_queried_tokens", "Prompt tokens looked up", queried, *labels)
        hits = [(names, group.num_hit_tokens) for names, group in groups]
        yield _counter("cidery_kv_hit_tokens", "Tokens that the group alone could have resumed", hits, *labels)
        limited = [(names, group.num_limited) for names, group in groups]
        yield _counter("cidery_kv_limited", "Look-ups whose hit the group ended", limited, *labels)
        evicted = [((*names, reason), count) for names, group in groups for reason, count in _evictions(group)]
        yield _counter("cidery_kv_evicted_blocks", "Blocks evicted by reason", evicted, *labels, "reason")


def _of_router(macs: Sequence[admin_pb2.Mac]) -> Iterator[Metric]:
    """What the router knows of Macs, whether or not they can be asked."""
    states = [((m.name, admin_pb2.MacState.Name(m.state).removeprefix("MAC_STATE_").lower()), 1) for m in macs]
    yield _gauge("cidery_router_mac_state", "1 for the Mac's present state", states, "state")
    booked = [((m.name,), m.load.num_requests) for m in macs]
    yield _gauge("cidery_router_booked_requests", "Requests booked and not released", booked)
    tokens = [((m.name,), m.load.num_prefill_tokens) for m in macs]
    yield _gauge("cidery_router_booked_prefill_tokens", "Prompt tokens booked and not prefilled", tokens)
    speeds = [((m.name,), m.prefill_tokens_per_s) for m in macs]
    yield _gauge("cidery_router_prefill_tokens_per_s", "Learnt speed at a prompt's start", speeds)
    for name, text in (
        ("predicted", "Cached prompt tokens as predicted when requests were routed"),
        ("actual", "Cached prompt tokens as the Macs then counted"),
        ("error", "Sum of the differences between the two, request by request"),
    ):
        counts = [((m.name,), getattr(m.drift, f"num_{name}_tokens")) for m in macs]
        yield _counter(f"cidery_router_hit_{name}_tokens", text, counts)
    alarms = [((m.name,), m.drift.is_alarming) for m in macs]
    yield _gauge("cidery_router_drift_alarm", "1 while predicted and actual hits differ too much", alarms)


def fleet_text(macs: Sequence[admin_pb2.Mac], *, is_router_up: bool = True) -> bytes:
    """The exposition format. Counters start anew with a Mac's manager, as Prometheus expects of restarts."""
    registry = CollectorRegistry()
    registry.register(_Fleet(macs, is_router_up=is_router_up))
    return generate_latest(registry)


def _bytes_by_state(cache: admin_pb2.KVCache) -> list[tuple[str, int]]:
    return [(state, getattr(cache, f"{state}_bytes")) for state in ("referenced", "cached", "free", "pinned")]


def _group_bytes(group: admin_pb2.KVGroup) -> list[tuple[str, int]]:
    return [(state, getattr(group, f"{state}_bytes")) for state in ("referenced", "cached")]


def _pool_bytes(pool: admin_pb2.KVPool) -> list[tuple[str, int]]:
    return [(state, getattr(pool, f"{state}_bytes")) for state in ("referenced", "cached", "free")]


def _evictions(group: admin_pb2.KVGroup) -> list[tuple[str, int]]:
    return [(reason, getattr(group, f"num_evicted_{reason}")) for reason in ("left_behind", "ranked", "orphaned")]


_Samples = Iterable[tuple[tuple[str, ...], float]]


def _gauge(name: str, text: str, samples: _Samples, *labels: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["mac", *labels])
    for names, value in samples:
        family.add_metric(names, value)
    return family


def _counter(name: str, text: str, samples: _Samples, *labels: str) -> Metric:
    family = CounterMetricFamily(name, text, labels=["mac", *labels])
    for names, value in samples:
        family.add_metric(names, value)
    return family
