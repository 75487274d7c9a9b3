"""A process whose vital task fails ends and says why; a cancelled task ends nothing."""

import subprocess
import sys

PROGRAM = """
import asyncio, logging
from cluster.vital import run_or_exit

logging.basicConfig()

async def fail():
    raise RuntimeError("the reason")

async def main():
    cancelled = run_or_exit(asyncio.sleep(60), "cancelled")
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.sleep(0.01)
    print("still here", flush=True)
    run_or_exit(fail(), "failing")
    await asyncio.sleep(5)
    print("never")

asyncio.run(main())
"""


def test_a_failed_task_ends_the_process_with_its_traceback():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stdout == "still here\n"
    assert "task failed, ending the process task=failing" in done.stderr
    assert "RuntimeError: the reason" in done.stderr
