"""Which kernels of the worker write through which of their inputs. Any other write to an input is an error."""

IN_PLACE: dict[str, tuple[str, ...]] = {
    "cidery_write_kv": ("key_pool", "value_pool"),
    "cidery_put_blocks": ("pool",),
    "cidery_write_quantized": ("packed", "scales", "biases"),
    "cidery_gated_delta": ("pool",),
    "cidery_short_conv": ("pool",),
    "cidery_mamba2": ("pool",),
}
