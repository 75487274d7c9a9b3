"""What a worker asks of its machine."""

import platform
import subprocess
import sys

import pytest

_SCRIPT = """
import resource
import mlx.core as mx
from worker import machine
{prepare}
x = mx.ones((1 << 22,))
mx.eval(x)
def run():
    mx.eval([x * number for number in range(8)])
for _ in range(3):
    run()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    run()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _num_faults(prepare: str) -> int:
    script = _SCRIPT.format(prepare=prepare)
    return int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that gives memory back at once")
def test_steps_have_the_memory_again_that_steps_before_have_freed():
    """Ten times 8 arrays of 16 MiB, of 4,096 pages each."""
    assert _num_faults("machine.prepare()") < 1_000
    assert _num_faults("") > 5_000
