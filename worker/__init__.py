"""One plain process a Mac: executes step plans on an MLX model over paged KV and reports what it did."""
