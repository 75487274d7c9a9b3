"""Series of the Macs, read back with prometheus_client's own parser."""

from prometheus_client.parser import text_string_to_metric_families

from cluster.fleet_metrics import fleet_text
from protos.cidery.v1 import admin_pb2

GROUP = admin_pb2.KVGroup(
    kind="window",
    num_layers=5,
    page_bytes=1024,
    num_queried_tokens=640,
    num_hit_tokens=320,
    num_limited=3,
    num_evicted_left_behind=7,
    num_evicted_ranked=8,
    num_evicted_orphaned=9,
    findable_bytes=10,
    referenced_bytes=14,
    cached_bytes=15,
)
POOL = admin_pb2.KVPool(page_bytes=1024, referenced_bytes=11, cached_bytes=12, free_bytes=13)


def samples(text):
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_mac_that_answers_shows_its_memory_and_groups():
    cache = admin_pb2.KVCache(
        referenced_bytes=1, cached_bytes=2, free_bytes=3, pinned_bytes=4, groups=[GROUP], pools=[POOL]
    )
    scheduling = admin_pb2.Scheduling(num_running=5, num_waiting=6, num_drafted_tokens=8, num_accepted_tokens=7)
    mac = admin_pb2.Mac(name="studio", kv_cache=cache, scheduling=scheduling)
    mac.kernel_failures["paged_decode"] = 2
    found = samples(fleet_text([mac]))
    of_mac, of_group = ("mac", "studio"), (("group", "0"), ("kind", "window"), ("mac", "studio"))
    assert found["cidery_router_up", ()] == 1
    assert found["cidery_mac_up", (of_mac,)] == 1
    for state, value in (("referenced", 1), ("cached", 2), ("free", 3), ("pinned", 4)):
        assert found["cidery_kv_bytes", (of_mac, ("state", state))] == value
    for state, value in (("referenced", 11), ("cached", 12), ("free", 13)):
        assert found["cidery_kv_pool_bytes", (of_mac, ("pool", "0"), ("state", state))] == value
    assert found["cidery_kv_findable_bytes", of_group] == 10
    for state, value in (("referenced", 14), ("cached", 15)):
        assert found["cidery_kv_group_bytes", (*of_group, ("state", state))] == value
    assert found["cidery_mac_running", (of_mac,)] == 5
    assert found["cidery_mac_waiting", (of_mac,)] == 6
    assert found["cidery_mac_drafted_tokens_total", (of_mac,)] == 8
    assert found["cidery_mac_accepted_tokens_total", (of_mac,)] == 7
    assert found["cidery_mac_kernel_failures_total", (("kernel", "paged_decode"), of_mac)] == 2
    assert found["cidery_kv_queried_tokens_total", of_group] == 640
    assert found["cidery_kv_hit_tokens_total", of_group] == 320
    assert found["cidery_kv_limited_total", of_group] == 3
    for reason, count in (("left_behind", 7), ("ranked", 8), ("orphaned", 9)):
        assert found["cidery_kv_evicted_blocks_total", (*of_group, ("reason", reason))] == count


def test_a_mac_that_is_away_is_down_and_has_no_numbers():
    found = samples(fleet_text([admin_pb2.Mac(name="mini")]))
    own = {key: value for key, value in found.items() if not key[0].startswith("cidery_router_")}
    assert own == {("cidery_mac_up", (("mac", "mini"),)): 0}


def test_the_router_s_view_is_shown_though_the_mac_is_away():
    drift = admin_pb2.Drift(num_predicted_tokens=7, num_actual_tokens=5, num_error_tokens=4, is_alarming=True)
    load = admin_pb2.Load(num_requests=2, num_prefill_tokens=300)
    state = admin_pb2.MAC_STATE_LOST
    mac = admin_pb2.Mac(name="mini", state=state, load=load, drift=drift, prefill_tokens_per_s=500.0)
    found, of_mac = samples(fleet_text([mac])), ("mac", "mini")
    assert found["cidery_router_mac_state", (of_mac, ("state", "lost"))] == 1
    assert found["cidery_router_booked_requests", (of_mac,)] == 2
    assert found["cidery_router_booked_prefill_tokens", (of_mac,)] == 300
    assert found["cidery_router_prefill_tokens_per_s", (of_mac,)] == 500.0
    for name, value in (("predicted", 7), ("actual", 5), ("error", 4)):
        assert found[f"cidery_router_hit_{name}_tokens_total", (of_mac,)] == value
    assert found["cidery_router_drift_alarm", (of_mac,)] == 1


def test_without_a_router_nothing_is_known_of_macs():
    assert samples(fleet_text([], is_router_up=False)) == {("cidery_router_up", ()): 0}
