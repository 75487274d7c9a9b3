"""How the bundled model was made: synthetic data, tokenizer, training loop and evaluation."""
