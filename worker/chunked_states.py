"""Recurrences over a prompt by chunks of tokens, for MLX's CPU build.

mlx-lm's code for a CPU goes token by token (gated delta rule: a dozen operations for each) or by chunks so long that
their squares are most of the work (Mamba 2). In a short chunk all is products: what its tokens give each other, what
they read of the state before them, and what they add to it; the state goes from chunk to chunk.
"""

import mlx.core as mx

from worker import cpu_math

# From here on a layer of gated delta net takes half as long or less; one of Mamba 2 a tenth of a millisecond longer up
# to twice as many tokens, and less from then on.
MIN_TOKENS = 8
# Longer chunks have more to do for each token, shorter ones more operations.
_DELTA_CHUNK = 16
_SSM_CHUNK = 32


def gated_delta(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array | None
) -> tuple[mx.array, mx.array]:
    """What mlx-lm's `gated_delta_ops` computes, up to rounding, in float32.

    Shapes: q, k `[rows, tokens, heads, key_dim]`, v `[rows, tokens, heads, value_dim]`, g and beta `[rows, tokens,
    heads]`, state `[rows, heads, value_dim, key_dim]`, zeros if None; results as v and as the state.

    What each token adds depends on those before it by a triangular system, which is solved for all chunks at once: the
    form of Yang et al., "Gated Delta Networks" (2024), section 3.3.
    """
    rows, num_tokens, heads, value_dim = v.shape
    size = min(_DELTA_CHUNK, num_tokens)
    # Behind the last one, tokens that add nothing and let all of the state through.
    q, k, v, beta = (_by_chunk(x, size) for x in (q, k, v, beta[..., None]))
    logs = mx.log(_by_chunk(g[..., None], size, 1.0)).squeeze(-1)
    between, since_start = _left_between(logs), mx.exp(logs.cumsum(axis=-1))[..., None]
    seen = (k @ k.swapaxes(-1, -2)) * between * beta * mx.tril(mx.ones((size, size)), -1)
    solved = mx.linalg.tri_inv(mx.eye(size) + seen, stream=mx.default_stream(mx.cpu)) * beta.swapaxes(-1, -2)
    values, keys = solved @ v, solved @ (k * since_start)
    read_new, read_old = (q @ k.swapaxes(-1, -2)) * between, q * since_start
    to_end = between[..., -1, :, None] * k
    if state is None:
        state = mx.zeros((rows, heads, value_dim, k.shape[-1]))
    outputs = []
    for chunk in range(q.shape[2]):
        before = state.swapaxes(-1, -2)
        added = values[:, :, chunk] - keys[:, :, chunk] @ before
        outputs.append(mx.addmm(read_old[:, :, chunk] @ before, read_new[:, :, chunk], added))
        kept = state * since_start[:, :, chunk, -1:]
        state = mx.addmm(kept, added.swapaxes(-1, -2), to_end[:, :, chunk])
    return _by_token(mx.stack(outputs, axis=2), num_tokens), state


def ssm(
    x: mx.array, log_decay: mx.array, b: mx.array, c: mx.array, state: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Mamba 2's recurrence: each token decays the state, adds its `x` times its `b`, and reads by its `c`; in float32.

    Shapes: x `[rows, tokens, heads, head_dim]`, log_decay `[rows, tokens, heads]`, b and c `[rows, tokens, groups,
    state_size]`, state `[rows, heads, head_dim, state_size]`, zeros if None; results as x and as the state. This is the
    form of Dao and Gu, "Transformers are SSMs" (2024), section 6.
    """
    rows, num_tokens, heads, head_dim = x.shape
    groups, state_size = b.shape[2:]
    size = min(_SSM_CHUNK, num_tokens)
    x, b, c = (_by_chunk(each, size) for each in (x, b, c))
    logs = _by_chunk(log_decay[..., None], size).squeeze(-1)
    between, since_start = _left_between(logs), mx.exp(logs.cumsum(axis=-1))[..., None]
    # The heads of a group have its b and c.
    b, c = (mx.repeat(each, heads // groups, axis=1) if heads > groups else each for each in (b, c))
    new = ((c @ b.swapaxes(-1, -2)) * between) @ x
    added, kept = (x * between[..., -1, :, None]).swapaxes(-1, -2) @ b, since_start[..., -1:, :]
    if state is None:
        state = mx.zeros((rows, heads, head_dim, state_size))
    befores = []
    for chunk in range(x.shape[2]):
        befores.append(state)
        state = state * kept[:, :, chunk] + added[:, :, chunk]
    old = (c * since_start) @ mx.stack(befores, axis=2).swapaxes(-1, -2)
    return _by_token(new + old, num_tokens), state


def _by_chunk(x: mx.array, size: int, filling: float = 0.0) -> mx.array:
    """`[rows, tokens, heads, dim]` to `[rows, heads, chunks, size, dim]`."""
    x = x.swapaxes(1, 2)
    num_behind = -x.shape[2] % size
    if num_behind:
        x = mx.pad(x, [(0, 0), (0, 0), (0, num_behind), (0, 0)], constant_values=filling)
    return x.reshape(*x.shape[:2], -1, size, x.shape[3])


def _by_token(x: mx.array, num_tokens: int) -> mx.array:
    """Back again."""
    rows, heads, _, _, dim = x.shape
    return x.reshape(rows, heads, -1, dim)[:, :, :num_tokens].swapaxes(1, 2)


def _left_between(logs: mx.array) -> mx.array:
    """How much of what each token adds is left after each later one, `[..., later, token]`; else zero.

    By the logarithms of decays. They are added up anew from each token on: of the sums from a chunk's start, which may
    be large, a difference would not be exact.
    """
    size = logs.shape[-1]
    later = mx.tril(mx.ones((size, size), mx.bool_), -1)
    since = mx.where(later, logs[..., None], 0.0).cumsum(axis=-2)
    return mx.tril(cpu_math.exp2(since * cpu_math.LOG2_E))
