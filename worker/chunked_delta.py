"""The gated delta rule over a prompt by chunks of tokens, for MLX's CPU build.

mlx-lm's code for a CPU goes token by token: a dozen operations each, which for a prompt take longer than its matrix
products. In a chunk, what each token adds to the state depends on those before it by a triangular system, which is
solved for all chunks at once; then a chunk is four products, and the state goes from chunk to chunk. This is the form
of Yang et al., "Gated Delta Networks" (2024), section 3.3.
"""

import mlx.core as mx

# Longer chunks have more to do for each token, shorter ones more operations.
_CHUNK = 16
# Of fewer tokens the loop is as fast.
MIN_TOKENS = 8
# The logarithm of a gate that has closed.
_LEAST_LOG = -20.0


def run(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array | None
) -> tuple[mx.array, mx.array]:
    """What mlx-lm's `gated_delta_ops` computes, up to rounding, in float32.

    Shapes: q, k `[rows, tokens, heads, key_dim]`, v `[rows, tokens, heads, value_dim]`, g and beta `[rows, tokens,
    heads]`, state `[rows, heads, value_dim, key_dim]`, zeros if None; results as v and as the state.
    """
    rows, num_tokens, heads, value_dim = v.shape
    num_behind = -num_tokens % min(_CHUNK, num_tokens)
    # A token that adds nothing and lets all of the state through.
    q, k, v, beta = (_chunked(x, num_behind) for x in (q, k, v, beta[..., None]))
    logs = mx.maximum(mx.log(_chunked(g[..., None], num_behind, 1.0)), _LEAST_LOG).squeeze(-1).cumsum(axis=-1)
    size = q.shape[-2]
    between = _decay_between(logs)
    # What a token adds, as if it were alone, lacks what it sees of those before it.
    seen = (k @ k.swapaxes(-1, -2)) * between * beta * mx.tril(mx.ones((size, size)), -1)
    solved = mx.linalg.tri_inv(mx.eye(size) + seen, stream=mx.default_stream(mx.cpu)) * beta.swapaxes(-1, -2)
    since_start = mx.exp(logs)[..., None]
    values, keys = solved @ v, solved @ (k * since_start)
    read_new = (q @ k.swapaxes(-1, -2)) * between
    read_old = q * since_start
    to_end = mx.exp(logs[..., -1:] - logs)[..., None] * k
    if state is None:
        state = mx.zeros((rows, heads, value_dim, k.shape[-1]))
    outputs = []
    for chunk in range(q.shape[2]):
        before = state.swapaxes(-1, -2)
        added = values[:, :, chunk] - keys[:, :, chunk] @ before
        outputs.append(mx.addmm(read_old[:, :, chunk] @ before, read_new[:, :, chunk], added))
        kept = state * since_start[:, :, chunk, -1:]
        state = mx.addmm(kept, added.swapaxes(-1, -2), to_end[:, :, chunk])
    y = mx.concatenate(outputs, axis=2) if len(outputs) > 1 else outputs[0]
    return y[:, :, :num_tokens].swapaxes(1, 2), state


def _chunked(x: mx.array, num_behind: int, filling: float = 0.0) -> mx.array:
    """`[rows, tokens, heads, dim]` to `[rows, heads, chunks, tokens of a chunk, dim]`."""
    x = x.swapaxes(1, 2)
    if num_behind:
        x = mx.pad(x, [(0, 0), (0, 0), (0, num_behind), (0, 0)], constant_values=filling)
    return x.reshape(*x.shape[:2], -1, min(_CHUNK, x.shape[2]), x.shape[3])


def _decay_between(logs: mx.array) -> mx.array:
    """Of the state after each token, how much of it is left after each later one; `[..., later, token]`, else zero."""
    since = logs[..., :, None] - logs[..., None, :]
    return mx.tril(mx.exp(mx.minimum(since, 0.0)))
