"""Metal kernels over paged KV, their MLX twins, and the one place that decides which of them runs."""
