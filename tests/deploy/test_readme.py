"""The README says what the files say."""

from pathlib import Path

README = (Path(__file__).parents[2] / "deploy" / "README.md").read_text()


def test_the_command_pins_the_autoscaler_that_starts_every_worker() -> None:
    assert "RAY_UP_enable_autoscaler_v2=0 ray up --no-config-cache -y deploy/cluster.yaml" in README


def test_it_uses_the_addresses_account_and_key_of_the_example(cluster) -> None:
    addresses = " ".join([cluster["provider"]["head_ip"], *cluster["provider"]["worker_ips"]])
    assert README.count(f"for ip in {addresses}; do") == 2
    assert f"{cluster['auth']['ssh_user']}@$ip" in README
    assert README.count(cluster["auth"]["ssh_private_key"]) >= 3


def test_it_names_the_ports_that_are_opened() -> None:
    assert "TCP 6379, 6381-6386,\n   10001, 20000-20199" in README
