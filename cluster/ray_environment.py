"""Ray's environment. Ray reads part of it when it is imported, so this comes first and imports no Ray."""

import os
import secrets
import sys


def prepare(*, is_local: bool) -> None:
    """Sets what Ray needs in this process and its children; what the user has set is kept.

    `is_local`: Ray is going to be started here. It listens on every interface whatever it is told, so strangers must
    at least need a token; this one lives as long as the processes.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray makes its workers nice by 15, and ours answer people.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if sys.platform == "darwin":
        # Without it Ray refuses several nodes on macOS and takes loopback for this node's address.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
    if is_local and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
