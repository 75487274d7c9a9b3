"""One Mac's continuous batching: which rows run in the next step."""
