"""A fleet on virtual time: the real router, KV managers and schedulers, with a cost model in place of each worker."""
