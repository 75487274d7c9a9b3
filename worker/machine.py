"""What the machine has, and how MLX's allocator is bound to it."""

import os
from pathlib import Path

import mlx.core as mx

# Freed buffers that MLX keeps for the next step; steps repeat their shapes, so a little is enough.
_CACHE_LIMIT_BYTES = 1 << 30
# What nobody may keep resident.
_SYSTEM_BYTES = 1 << 30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_limit_bytes() -> int:
    """What the engine may use: Metal's recommended working set, or the memory of the machine or its container."""
    if mx.metal.is_available():
        return int(mx.device_info()["max_recommended_working_set_size"])
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else "max"
    return min(total, int(limit)) if limit.isdigit() else total


def prepare() -> None:
    """Keep weights and KV resident on Metal, bound MLX's cache of freed buffers, and choose how graphs run.

    Beyond the memory limit MLX gives freed buffers back first, so they are not counted into what KV may take.
    """
    limit = memory_limit_bytes()
    mx.set_cache_limit(min(_CACHE_LIMIT_BYTES, limit // 16))
    if mx.metal.is_available():
        mx.set_memory_limit(limit)
        # It must stay below the whole memory, up to which `sysctl iogpu.wired_limit_mb` may raise the working set.
        mx.set_wired_limit(min(limit, int(mx.device_info()["memory_size"]) - _SYSTEM_BYTES))
    else:
        # Fusing kernels on a CPU needs a C++ compiler at run time, costs seconds at first use and gains nothing
        # measurable.
        mx.disable_compile()
