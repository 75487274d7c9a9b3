"""`cidery worker selftest`: every kernel against its twin on this machine's GPU, now and by hand."""

import argparse
import logging
import sys
from typing import TYPE_CHECKING

from worker import switches

if TYPE_CHECKING:
    import mlx.core as mx


def main() -> int:
    """Run the tests; 1 if a kernel failed."""
    options = _parse()
    # MLX takes a second, which a mistyped option need not.
    import mlx.core as mx

    from worker.metal import self_test
    from worker.metal.self_test_cases import FAMILIES

    logging.basicConfig(level=logging.ERROR)
    if not mx.metal.is_available():
        sys.stdout.write("This machine has no Metal: workers run in plain MLX, and there is no kernel to test.\n")
        return 0
    chip, system, mlx = self_test.this_machine()
    sys.stdout.write(f"{chip}, {system}, MLX {mlx}\n")
    needs = _needs(options, getattr(mx, options.dtype))
    self_test.ResultMemory.forget_all()
    has_failed = False
    for family in FAMILIES:
        report = self_test.run([family], needs, mx.fast.metal_kernel)
        result = report.failures.get(family.name, "passed")
        has_failed |= bool(report.failures)
        sys.stdout.write(f"{family.name:<20} {report.seconds:6.2f} s  {result}\n")
    return int(has_failed)


def _needs(options: argparse.Namespace, dtype: "mx.Dtype") -> list[object]:
    """Layers of each kind, with the heads that were asked for."""
    from worker.metal.decode_checks import LatentNeeds
    from worker.metal.self_test import AttentionNeeds, RopeNeeds
    from worker.metal.state_self_test import GatedDeltaShape, Mamba2Shape, ShortConvShape

    heads = options.num_heads, options.num_kv_heads
    needs: list[object] = []
    for head_dim in options.head_dim:
        needs += [
            AttentionNeeds(*heads, head_dim, dtype),
            AttentionNeeds(*heads, head_dim, dtype, window=40, has_sinks=True),
            AttentionNeeds(*heads, head_dim, dtype, chunk=24, softcap=30.0),
            RopeNeeds(*heads, head_dim, dtype, head_dim, is_traditional=False, has_freqs=False),
            RopeNeeds(*heads, head_dim, dtype, head_dim // 4 * 2, is_traditional=True, has_freqs=True),
        ]
        if options.bits:
            needs.append(AttentionNeeds(*heads, head_dim, dtype, bits=options.bits))
    return [
        *needs,
        AttentionNeeds(*heads, 192, dtype, value_dim=128),
        LatentNeeds(16, 512, 64, dtype),
        GatedDeltaShape(4, 8, 128, 128, dtype),
        Mamba2Shape(8, 1, 64, 128, dtype, (0.0, float("inf"))),
        ShortConvShape(1024, 4, dtype, dtype, has_bias=True, has_silu=True),
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cidery worker selftest", description=__doc__)
    parser.add_argument(
        "--head-dim", type=int, nargs="+", default=[64, 128, 256], help="elements of an attention head  [64 128 256]"
    )
    parser.add_argument("--num-heads", type=int, default=8, help="query heads  [8]")
    parser.add_argument("--num-kv-heads", type=int, default=2, help="KV heads  [2]")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"), help="[bfloat16]")
    parser.add_argument(
        "--bits", type=int, default=8, choices=(0, 4, 8), help="of quantised pools, 0 for plain ones  [8]"
    )
    options = parser.parse_args()
    switches.check_all(parser)
    return options


if __name__ == "__main__":
    sys.exit(main())
