"""Head and per-Mac control plane.

Pure packages: `kv` (one Mac's KV ledger), `scheduling` (continuous batching), `routing` (which Mac). Everything beside
them is an edge: it does the input and output and holds no decision.
"""
