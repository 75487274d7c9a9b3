"""What the machine has, and how allocators are bound to it."""

import ctypes
import os
import platform
from pathlib import Path

import mlx.core as mx

# Freed buffers that MLX keeps for the next step; steps repeat their shapes, so a little is enough.
_CACHE_LIMIT_BYTES = 1 << 30
# What nobody may keep resident.
_SYSTEM_BYTES = 1 << 30
# From malloc.h; what is larger than the last one allows is always given back, as pools are that grew.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_GROWTH_BYTES, _LARGEST = 64 << 20, 32 << 20
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_limit_bytes() -> int:
    """What the engine may use: Metal's recommended working set, or the memory of the machine or its container."""
    if mx.metal.is_available():
        return int(mx.device_info()["max_recommended_working_set_size"])
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else "max"
    return min(total, int(limit)) if limit.isdigit() else total


def kept_bytes(limit_bytes: int) -> int:
    """Of an engine that may use so many: what it keeps from step to step to be faster, beside weights and KV."""
    return min(_CACHE_LIMIT_BYTES, limit_bytes // 16)


def strip_bytes(limit_bytes: int) -> int:
    """Of an engine that may use so many: what a second copy of weights may take (`worker.strips`)."""
    return limit_bytes // 8


def prepare() -> None:
    """Keep weights and KV resident on Metal, bound MLX's cache of freed buffers, and choose how graphs run.

    Beyond the memory limit MLX gives freed buffers back first, so they are not counted into what KV may take.
    """
    limit = memory_limit_bytes()
    mx.set_cache_limit(kept_bytes(limit))
    if mx.metal.is_available():
        mx.set_memory_limit(limit)
        # It must stay below the whole memory, up to which `sysctl iogpu.wired_limit_mb` may raise the working set.
        mx.set_wired_limit(min(limit, int(mx.device_info()["memory_size"]) - _SYSTEM_BYTES))
    else:
        # Fusing kernels on a CPU needs a C++ compiler at run time, costs seconds at first use and gains nothing
        # measurable.
        mx.disable_compile()
        _keep_freed_memory(kept_bytes(limit))


def _keep_freed_memory(num_bytes: int) -> None:
    """Have glibc's malloc, from which MLX takes arrays on a CPU, keep what is freed.

    It gives large blocks back to the system at once, which clears every page before a step has it again: steps took up
    to half as long again, a gather of 9 MB four times as long.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    for option, value in ((_M_TRIM_THRESHOLD, num_bytes), (_M_TOP_PAD, _GROWTH_BYTES), (_M_MMAP_THRESHOLD, _LARGEST)):
        libc.mallopt(option, value)
