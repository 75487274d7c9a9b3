"""Background tasks without which a process must not go on."""

import asyncio
import logging
import os
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


def run_or_exit(work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
    """Runs `work` beside everything else in an actor's process.

    An error that nobody expected is logged with its traceback and ends the process, so that Ray starts a fresh actor
    rather than leaving one that looks alive. Cancelling the task is fine.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_exit_if_failed)
    return task


def _exit_if_failed(task: "asyncio.Task[None]") -> None:
    if task.cancelled() or task.exception() is None:
        return
    log.critical("task failed, ending the process task=%s", task.get_name(), exc_info=task.exception())
    logging.shutdown()
    os._exit(1)
