"""The workflow on a GPU: kernels are tested on a real one, and a virtual one is said to be none."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

_JOBS = yaml.safe_load((Path(__file__).parents[2] / ".github/workflows/metal.yml").read_text())["jobs"]


@pytest.mark.parametrize(
    ("device", "is_real"),
    [("Apple M3 Ultra", True), ("Apple Paravirtual device", False), ("no GPU", False)],
)
def test_a_virtual_gpu_ends_in_a_notice_and_no_error(tmp_path, device, is_real):
    (step,) = [step for step in _JOBS["gpu"]["steps"] if step.get("id") == "device"]
    python = tmp_path / "mlx" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho '{device}'\n")
    python.chmod(0o755)
    environment = os.environ | {"RUNNER_TEMP": str(tmp_path), "GITHUB_OUTPUT": str(tmp_path / "output")}
    done = subprocess.run(["bash", "-e", "-c", step["run"]], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "output").read_text() == f"is_real={str(is_real).lower()}\n"
    assert device in done.stdout
    assert done.stdout.startswith("::notice title=No kernel was tested::") != is_real


def test_a_step_that_can_not_ask_the_device_fails(tmp_path):
    """No MLX is no virtual GPU."""
    (step,) = [step for step in _JOBS["gpu"]["steps"] if step.get("id") == "device"]
    environment = os.environ | {"RUNNER_TEMP": str(tmp_path), "GITHUB_OUTPUT": str(tmp_path / "output")}
    assert subprocess.run(["bash", "-e", "-c", step["run"]], env=environment, capture_output=True).returncode


def test_kernels_run_only_where_the_device_is_real():
    kernels = _JOBS["kernels"]
    assert (kernels["needs"], kernels["if"]) == ("gpu", "needs.gpu.outputs.is_real == 'true'")
    assert _JOBS["gpu"]["outputs"] == {"is_real": "${{ steps.device.outputs.is_real }}"}
    assert "vars.METAL_RUNNER" in kernels["runs-on"]
    assert "head.repo.fork" in _JOBS["gpu"]["runs-on"]
