"""start.sh, run through Ray's own wrapping of commands, starts Ray with arguments that Ray's parser takes."""

import json
import time

import pytest


def ray_starts(mac) -> list[dict]:
    return [call for call in mac.calls("ray") if call["args"][0] == "start"]


def parsed(call: dict) -> dict:
    """Raises if `ray start` has no such option, or not with such a value."""
    from ray.scripts.scripts import start

    return start.make_context("start", call["args"][1:]).params


@pytest.fixture(params=["head", "worker"])
def role(request) -> str:
    return request.param


def test_ray_understands_every_argument(mac, start_command, role) -> None:
    assert mac.run(start_command(role)).returncode == 0
    (call,) = ray_starts(mac)
    params = parsed(call)
    assert params["object_store_memory"] == 100_000_000
    assert params["num_gpus"] == 0
    assert params["head"] == (role == "head")


def test_the_resources_name_the_mac(mac, start_command, role) -> None:
    """Through YAML, Ray's quoting, SSH's shell and ours it is still JSON."""
    mac.run(start_command(role))
    (call,) = ray_starts(mac)
    resources = json.loads(parsed(call)["resources"])
    assert resources == {"mac": 1, "mac:Marias-Mac-mini": 1} | ({"head": 1} if role == "head" else {})


def test_without_scutil_the_host_name_names_it(mac, start_command) -> None:
    (mac.programs / "scutil").unlink()
    mac.run(start_command("worker"))
    (call,) = ray_starts(mac)
    (name,) = [key for key in json.loads(parsed(call)["resources"]) if key.startswith("mac:")]
    assert name != "mac:"
    assert "." not in name


def test_the_head_listens_where_the_workers_look(mac, cluster, start_command) -> None:
    mac.run(start_command("head"))
    mac.run(start_command("worker"))
    head, worker = map(parsed, ray_starts(mac))
    assert head["node_ip_address"] == cluster["provider"]["head_ip"]
    assert worker["address"] == f"{head['node_ip_address']}:{head['port']}"


def test_the_head_starts_the_workers(mac, start_command) -> None:
    mac.run(start_command("head"))
    (call,) = ray_starts(mac)
    assert parsed(call)["autoscaling_config"] == str(mac.home / "ray_bootstrap_config.yaml")


def test_the_head_opens_no_dashboard(mac, start_command) -> None:
    mac.run(start_command("head"))
    (call,) = ray_starts(mac)
    assert parsed(call)["include_dashboard"] is False


def test_every_port_is_pinned_and_none_twice(mac, start_command, role) -> None:
    mac.run(start_command(role))
    (call,) = ray_starts(mac)
    params = parsed(call)
    names = [
        "node_manager_port",
        "object_manager_port",
        "runtime_env_agent_port",
        "dashboard_agent_grpc_port",
        "dashboard_agent_listen_port",
        "metrics_export_port",
        *(["port", "ray_client_server_port"] if role == "head" else []),
    ]
    ports = [int(params[name]) for name in names]
    workers = range(int(params["min_worker_port"]), int(params["max_worker_port"]) + 1)
    assert all(ports)
    assert len(set(ports)) == len(ports)
    assert len(workers) == 200
    assert not set(ports) & set(workers)


def test_the_environment_is_explicit(mac, start_command, role) -> None:
    mac.run(start_command(role))
    (call,) = ray_starts(mac)
    environ = call["environ"]
    assert environ["RAY_AUTH_MODE"] == "token"
    assert environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "1"
    assert environ["RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL"] == "minor"
    assert environ["RAY_USAGE_STATS_ENABLED"] == "0"
    health = {key: int(value) for key, value in environ.items() if key.startswith("RAY_health_check_")}
    if role == "worker":
        assert health == {}
        return
    period_s = health["RAY_health_check_period_ms"] / 1000
    timeout_s = health["RAY_health_check_timeout_ms"] / 1000
    assert (period_s + timeout_s) * health["RAY_health_check_failure_threshold"] < 10


def test_usage_statistics_stay_off_though_ray_up_turns_them_on(mac, start_command) -> None:
    mac.run("export RAY_USAGE_STATS_ENABLED=1; " + start_command("head"))
    (call,) = ray_starts(mac)
    assert call["environ"]["RAY_USAGE_STATS_ENABLED"] == "0"


@pytest.mark.parametrize(("num_failures", "num_starts", "returncode"), [(0, 1, 0), (2, 3, 0), (9, 3, 1)])
def test_a_start_that_fails_is_tried_again(
    mac, start_command, num_failures: int, num_starts: int, returncode: int
) -> None:
    mac.fail("ray", "start", times=num_failures)
    assert mac.run(start_command("worker")).returncode == returncode
    verbs = [call["args"][0] for call in mac.calls("ray")]
    assert verbs == ["stop", "start"] * num_starts


def test_the_mac_is_kept_awake_as_long_as_ray_runs(mac, start_command, role) -> None:
    mac.run(start_command(role))
    deadline_s = time.monotonic() + 10
    while not mac.calls("caffeinate") and time.monotonic() < deadline_s:
        time.sleep(0.02)
    (call,) = mac.calls("caffeinate")
    assert call["args"] == ["-is", "-w", "4711"]


def test_a_machine_without_caffeinate_starts_too(mac, start_command) -> None:
    (mac.programs / "caffeinate").unlink()
    assert mac.run(start_command("worker")).returncode == 0


def test_an_unknown_role_starts_nothing(mac) -> None:
    done = mac.run("bash ~/.cidery/start.sh hed 10.0.0.1")
    assert done.returncode == 2
    assert "head or worker, got 'hed'" in done.stderr
    assert mac.calls("ray") == []
