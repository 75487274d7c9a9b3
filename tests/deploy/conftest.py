"""A Mac's home folder in which every program that the deployment calls only writes down how it was called."""

import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

# Fails as often as the file beside it says, then succeeds.
_FAKE = """#!{python} -I
import json, os, pathlib, sys
name = pathlib.Path(sys.argv[0]).name
here = pathlib.Path(sys.argv[0]).parent
environ = {{key: value for key, value in os.environ.items() if key.startswith("RAY_")}}
with open(here / "calls", "a") as calls:
    calls.write(json.dumps({{"name": name, "args": sys.argv[1:], "environ": environ}}) + "\\n")
print({answers}.get(name, ""))
failures = here / (name + "-" + (sys.argv[1] if len(sys.argv) > 1 else "") + ".failures")
left = int(failures.read_text()) if failures.exists() else 0
failures.write_text(str(max(0, left - 1)))
sys.exit(left > 0)
"""
_ANSWERS = {"scutil": "Marias-Mac-mini", "pgrep": "4711"}
_PROGRAMS = ("ray", "sleep", "scutil", "pgrep", "caffeinate", "python3.12")


class FakeMac:
    """`run` executes a command as Ray would over SSH; `calls` is what it called."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.programs = home / ".cidery" / "venv" / "bin"
        self.programs.mkdir(parents=True)
        (home / ".ray").mkdir()
        for name in ("env.sh", "start.sh"):
            shutil.copy(DEPLOY / name, home / ".cidery" / name)
        for name in _PROGRAMS:
            self.add_program(name)

    def add_program(self, name: str) -> None:
        path = self.programs / name
        path.write_text(_FAKE.format(python=sys.executable, answers=_ANSWERS))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def fail(self, program: str, first_arg: str, times: int) -> None:
        (self.programs / f"{program}-{first_arg}.failures").write_text(str(times))

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        from ray.autoscaler._private.command_runner import _with_interactive

        # What an SSH client hands to the login shell of the account.
        wrapped = " ".join(_with_interactive(command))
        environ = {"HOME": str(self.home), "PATH": "/usr/bin:/bin", "SHELL": "/bin/bash"}
        return subprocess.run(
            ["/bin/sh", "-c", wrapped],
            env=environ,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def calls(self, name: str) -> list[dict[str, Any]]:
        log = self.programs / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        return [call for call in map(json.loads, lines) if call["name"] == name]


@pytest.fixture
def mac(tmp_path: Path) -> FakeMac:
    return FakeMac(tmp_path)


@pytest.fixture
def cluster() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "cluster.yaml").read_text())
    return loaded


@pytest.fixture
def start_command(cluster: dict[str, Any]) -> Callable[[str], str]:
    """The one command that starts Ray, as Ray completes it for that role."""

    def command(role: str) -> str:
        from ray.autoscaler._private.util import with_head_node_ip

        if role == "head":
            (only,) = cluster["head_start_ray_commands"]
        else:
            (only,) = with_head_node_ip(cluster["worker_start_ray_commands"], cluster["provider"]["head_ip"])
        return str(only)

    return command
