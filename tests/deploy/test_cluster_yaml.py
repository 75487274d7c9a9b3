"""cluster.yaml is what `ray up` accepts, and its commands do on a Mac what they are meant to do."""

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUP_TOKEN, SETUP_BASHRC, SETUP_VENV, SETUP_INSTALL = range(4)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class TestRayAcceptsIt:
    def test_rays_schema(self, cluster) -> None:
        from ray.autoscaler._private.util import prepare_config, validate_config

        prepared = prepare_config(cluster)
        validate_config(prepared)
        (node_type,) = prepared["available_node_types"].values()
        num_workers = len(cluster["provider"]["worker_ips"])
        assert (node_type["min_workers"], node_type["max_workers"]) == (num_workers, num_workers)

    def test_a_mistyped_field_would_be_seen(self, cluster) -> None:
        """Guards the test above: the schema does look."""
        from jsonschema import ValidationError
        from ray.autoscaler._private.util import prepare_config, validate_config

        with pytest.raises(ValidationError, match="worker_start_ray_command"):
            validate_config(prepare_config(cluster | {"worker_start_ray_command": []}))

    def test_every_command_is_shell(self, cluster) -> None:
        commands = [each for key in cluster if key.endswith("_commands") for each in cluster[key]]
        assert len(commands) == 6
        for command in commands:
            subprocess.run(["bash", "-n", "-c", command], check=True)

    def test_the_head_is_started_at_its_own_address(self, cluster) -> None:
        (command,) = cluster["head_start_ray_commands"]
        assert command.split()[-1] == cluster["provider"]["head_ip"]

    def test_what_it_mounts_is_here(self, cluster) -> None:
        """The token comes from the operator's home, the wheel from a build; all else is in the repository."""
        sources = set(cluster["file_mounts"].values())
        assert sources - {"~/.ray/auth_token", "./dist"} == {"./deploy/env.sh", "./deploy/start.sh"}
        assert all((ROOT / source).is_file() for source in ("./deploy/env.sh", "./deploy/start.sh"))

    def test_no_secret_is_kept_here(self) -> None:
        for path in (ROOT / "deploy").rglob("*"):
            text = path.read_text() if path.is_file() else ""
            assert not re.search(r"PRIVATE KEY|\b[0-9a-fA-F]{32,}\b|RAY_AUTH_TOKEN=", text), path

    def test_no_worker_is_ever_idle(self, cluster) -> None:
        assert cluster["idle_timeout_minutes"] > 365 * 24 * 60


class TestSetUp:
    def test_the_token_is_for_its_owner_only(self, mac, cluster) -> None:
        token = mac.home / ".ray" / "auth_token"
        token.write_text("secret")
        token.chmod(0o644)
        assert mac.run(cluster["setup_commands"][SETUP_TOKEN]).returncode == 0
        assert (mode(token), mode(token.parent)) == (0o600, 0o700)

    def test_rays_own_commands_find_ray_and_the_token_mode(self, mac, cluster) -> None:
        """`ray down` and the head's monitor run plain `ray ...` in a bash that reads ~/.bashrc."""
        for _ in range(2):
            assert mac.run(cluster["setup_commands"][SETUP_BASHRC]).returncode == 0
        assert (mac.home / ".bashrc").read_text() == "source ~/.cidery/env.sh\n"
        assert mac.run("ray stop").returncode == 0
        (call,) = mac.calls("ray")
        assert call["environ"]["RAY_AUTH_MODE"] == "token"

    def test_an_environment_that_exists_is_kept(self, mac, cluster) -> None:
        command = cluster["setup_commands"][SETUP_VENV]
        mac.run(command)
        mac.add_program("python")
        mac.run(command)
        (call,) = mac.calls("python3.12")
        assert call["args"] == ["-m", "venv", str(mac.home / ".cidery" / "venv")]

    def test_the_newest_wheel_is_installed_even_over_the_same_version(self, mac, cluster) -> None:
        wheels = mac.home / ".cidery" / "wheels"
        wheels.mkdir()
        for name, built_s in (("cidery-0.1.0-py3-none-any.whl", 2_000), ("cidery-0.2.0-py3-none-any.whl", 1_000)):
            (wheels / name).touch()
            os.utime(wheels / name, (built_s, built_s))
        mac.add_program("python")
        assert mac.run(cluster["setup_commands"][SETUP_INSTALL]).returncode == 0
        first, second = (call["args"] for call in mac.calls("python"))
        assert first[-1] == second[-1] == str(wheels / "cidery-0.1.0-py3-none-any.whl")
        assert {"--no-deps", "--force-reinstall"} <= set(second)

    def test_a_failed_installation_stops_ray_up(self, mac, cluster) -> None:
        mac.add_program("python")
        mac.fail("python", "-m", times=1)
        assert mac.run(cluster["setup_commands"][SETUP_INSTALL]).returncode != 0
