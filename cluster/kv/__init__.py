"""One Mac's KV cache ledger: hashes, blocks and who holds them; ids only, never tensors."""
