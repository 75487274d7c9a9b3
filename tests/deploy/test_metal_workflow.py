"""The workflow on a GPU: kernels are tested on any, and a virtual one gives no verdict."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

_JOBS = yaml.safe_load((Path(__file__).parents[2] / ".github/workflows/metal.yml").read_text())["jobs"]


@pytest.mark.parametrize(
    ("device", "kind", "title"),
    [
        ("Apple M3 Ultra", "real", None),
        ("Apple Paravirtual device", "virtual", "Kernels run on a virtual GPU"),
        ("no GPU", "none", "No kernel was tested"),
    ],
)
def test_a_virtual_gpu_gives_a_notice_and_no_error(tmp_path, device, kind, title):
    (step,) = [step for step in _JOBS["gpu"]["steps"] if step.get("id") == "device"]
    python = tmp_path / "mlx" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho '{device}'\n")
    python.chmod(0o755)
    environment = os.environ | {"RUNNER_TEMP": str(tmp_path), "GITHUB_OUTPUT": str(tmp_path / "output")}
    done = subprocess.run(["bash", "-e", "-c", step["run"]], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "output").read_text() == f"kind={kind}\n"
    assert device in done.stdout
    assert done.stdout.startswith(f"::notice title={title}::" if title else "Kernels will be tested on")


def test_a_step_that_can_not_ask_the_device_fails(tmp_path):
    """No MLX is no virtual GPU."""
    (step,) = [step for step in _JOBS["gpu"]["steps"] if step.get("id") == "device"]
    environment = os.environ | {"RUNNER_TEMP": str(tmp_path), "GITHUB_OUTPUT": str(tmp_path / "output")}
    assert subprocess.run(["bash", "-e", "-c", step["run"]], env=environment, capture_output=True).returncode


def test_kernels_run_on_any_gpu_and_fail_the_workflow_on_a_real_one():
    kernels = _JOBS["kernels"]
    assert (kernels["needs"], kernels["if"]) == ("gpu", "needs.gpu.outputs.kind != 'none'")
    assert kernels["continue-on-error"] == "${{ needs.gpu.outputs.kind == 'virtual' }}"
    assert _JOBS["gpu"]["outputs"] == {"kind": "${{ steps.device.outputs.kind }}"}
    assert "vars.METAL_RUNNER" in kernels["runs-on"]
    assert "head.repo.fork" in _JOBS["gpu"]["runs-on"]
    commands = [step["run"] for step in kernels["steps"] if "run" in step]
    assert ".venv/bin/cidery worker selftest" in commands
    assert any("pytest -q -m metal" in command for command in commands)
