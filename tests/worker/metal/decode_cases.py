"""The variants of decode attention that tests run, on the harness and on a GPU."""

import mlx.core as mx

from tests.worker.metal.decode_data import Case

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)

# By pairs of axes: head size, block size, heads a KV head, type, window, chunk, cap, sinks, bits.
CASES = [
    Case("one token", (1,), 2, 1, 64, dtype=F32),
    Case("ragged, shared block", (1, 16, 37, 129), 2, 4, 64, block_size=16, dtype=BF16),
    Case("exact blocks", (32, 64), 1, 2, 64, block_size=32, dtype=F16),
    Case("sinks, window", (150, 9), 1, 8, 64, window=100, has_sinks=True, dtype=F16),
    Case("sinks of few heads", (20,), 1, 3, 64, has_sinks=True, dtype=F32),
    Case("window below a block", (150, 3, 64), 2, 5, 80, window=5, block_size=32, dtype=F32),
    Case("lanes without elements", (21,), 1, 7, 80, dtype=BF16),
    Case("80 f16", (21, 3), 1, 2, 80, dtype=F16),
    Case("96 f32", (18,), 1, 2, 96, dtype=F32),
    Case("112 f16", (19,), 1, 2, 112, has_sinks=True, dtype=F16),
    Case("112 f32, large blocks", (40, 3), 2, 1, 112, block_size=32, dtype=F32),
    Case("odd ratio", (90, 17), 3, 3, 96, window=1000, dtype=F16),
    Case("chunk", (100, 64, 65, 1), 1, 4, 96, chunk=64, block_size=32, dtype=BF16),
    Case("soft cap", (40, 41), 1, 6, 112, softcap=1.5, dtype=F32),
    Case("soft cap, window, sinks", (70,), 2, 2, 112, softcap=2.0, window=33, has_sinks=True, dtype=BF16),
    Case("eight heads", (300, 33), 1, 8, 128, block_size=32, dtype=F16),
    Case("no sharing", (65, 2), 3, 1, 128, window=16, dtype=BF16),
    Case("chunk larger than all", (50,), 2, 4, 128, chunk=8192, softcap=3.0, dtype=F32),
    Case("more partitions than lanes", (1100, 40), 1, 2, 128, dtype=F16),
    Case("192", (77, 30), 1, 4, 192, block_size=32, dtype=F16),
    Case("keys and values unlike", (45,), 2, 2, 192, 128, dtype=BF16),
    Case("256", (66,), 2, 2, 256, window=40, dtype=BF16),
    Case("256, large blocks", (35, 2), 1, 2, 256, chunk=16, block_size=32, dtype=F16),
    Case("256 f32", (17,), 1, 2, 256, dtype=F32),
    Case("512 bf16", (9,), 1, 1, 512, dtype=BF16),
    Case("512", (35, 7), 1, 2, 512, block_size=32, dtype=F16),
    Case("staged 64", (97, 5), 1, 16, 64, has_sinks=True, dtype=F16),
    Case("staged 128, odd", (140, 1), 1, 17, 128, window=37, block_size=32, dtype=BF16),
    Case("staged 128 f32", (40,), 2, 12, 128, chunk=24, dtype=F32),
    Case("staged 256", (67, 12), 1, 8, 256, softcap=2.0, dtype=F16),
    Case("staged 512", (36,), 1, 8, 512, window=20, dtype=F32),
    Case("staged 192", (34, 50), 1, 6, 192, dtype=F32),
    Case("more heads than a threadgroup", (20,), 1, 71, 64, dtype=F16),
    Case("8 bits, group 64", (130, 1), 2, 4, 128, bits=8, group=64, dtype=F16),
    Case("8 bits, group 32, window", (70, 9), 1, 8, 64, bits=8, group=32, window=21, block_size=32, dtype=BF16),
    Case("4 bits, group 32", (90,), 3, 2, 96, bits=4, group=32, has_sinks=True, dtype=F32),
    Case("4 bits, group 64", (33, 48), 1, 5, 64, bits=4, group=64, chunk=32, dtype=F16),
    Case("4 bits, staged", (50, 18), 1, 8, 256, bits=4, group=64, block_size=32, dtype=BF16),
    Case("8 bits, staged, cap", (37,), 1, 16, 128, bits=8, group=32, softcap=2.0, dtype=F32),
    Case("latent", (100, 31), 1, 16, 576, 512, is_latent=True, dtype=F16),
    Case("latent, few heads", (1, 40), 1, 3, 576, 512, is_latent=True, block_size=32, dtype=F32),
    Case("latent, many heads", (18,), 1, 20, 576, 512, is_latent=True, dtype=BF16),
    Case("latent, 8 bits", (20, 7), 1, 16, 576, 512, is_latent=True, bits=8, group=64, dtype=F32),
    Case("latent, 4 bits", (50,), 1, 5, 96, 64, is_latent=True, bits=4, group=32, block_size=32, dtype=F16),
    Case("latent, 8 bits, bfloat16", (20, 7), 1, 16, 576, 512, is_latent=True, bits=8, group=64, dtype=BF16),
    Case("latent, 4 bits, bfloat16", (33,), 1, 5, 96, 64, is_latent=True, bits=4, group=32, dtype=BF16),
    Case("small latent", (70,), 1, 10, 288, 256, is_latent=True, dtype=F16),
]

# Several rows a sequence.
VERIFY_CASES = [
    Case("verify", (61, 130), 2, 4, 64, rows=4, dtype=F16),
    Case("verify, staged", (30,), 1, 8, 128, rows=5, dtype=BF16),
    Case("verify, window across partitions", (127, 64, 66), 1, 2, 128, rows=3, window=64, block_size=32, dtype=F32),
    Case("verify, sinks, chunk", (62,), 1, 8, 64, rows=3, chunk=64, has_sinks=True, softcap=2.0, dtype=F16),
    Case("verify, 8 bits", (60,), 1, 4, 128, rows=2, bits=8, group=64, dtype=F16),
    Case("verify, more rows than a threadgroup", (20,), 1, 12, 256, rows=6, dtype=F16),
]
