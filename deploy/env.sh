# Read by every shell that talks to the fleet, on each Mac; valid in zsh and bash.

# Homebrew and python.org put Python where a shell over SSH doesn't look.
export PATH="$HOME/.cidery/venv/bin:/opt/homebrew/bin:/usr/local/bin:$PATH"

# Ray listens on every interface. Without the mode it asks for the token only if a token file happens to exist.
export RAY_AUTH_MODE=token

# Without it Ray refuses several nodes on macOS, and processes take 127.0.0.1 for the Mac's address.
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1

# Macs seldom have the same Python to the patch level, which Ray asks for by default.
export RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor

# `ray up` sets 1.
export RAY_USAGE_STATS_ENABLED=0

# Ray makes its workers nice by 15; ours answer people.
export RAY_worker_niceness=0
