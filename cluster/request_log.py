"""The gateway's anonymised request log: lengths and hashes, never a token, a text or a name of a client.

One JSON object a line, for each request that was given to a Mac or waited for one:

    {"cidery": 1, "at": 1764489600.25, "model": "Qwen3-8B", "prompt": 1234, "output": 56, "max": 256,
     "block": 64, "hashes": "base64", "ends": [310, 1200], "finish": "stop"}

    cidery   version of the format
    at       arrival, Unix time in seconds
    prompt, output, max     tokens of the prompt, of the answer as far as it got, and of the longest answer allowed
    block    tokens that one hash stands for
    hashes   of the full blocks of prompt and answer, first to last, 8 bytes each; each covers all before it too
    ends     token offsets in the prompt at which messages end
    finish   stop, length, or none: aborted, refused or failed

Hashes are keyed with a secret of the process that is kept nowhere, so that nobody who holds the log can tell whether a
text that he guesses was in it. Hence what a restarted gateway writes shares nothing with what was there before.
`cidery simulate` reads such a file.
"""

import base64
import json
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TextIO

from cluster.errors import StartupFailed
from cluster.kv.hashing import BlockHash, hash_blocks
from cluster.scheduling.request import Finish

log = logging.getLogger(__name__)

VERSION = 1
HASH_BYTES = 8
# One hash stands for so many tokens, or for a block if that is longer: a quarter of the lines' length.
_TOKENS_PER_HASH = 64


class RequestLog:
    """Appends to a file that only its user may read. Raises StartupFailed if it can't be opened."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._secret = secrets.token_bytes(32)
        try:
            self._file: TextIO | None = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a")
        except OSError as error:
            raise StartupFailed(f"request log {path} can't be opened: {error.strerror}") from error

    def write(
        self,
        *,
        at_s: float,
        model: str,
        root: BlockHash,
        block_size: int,
        prompt: Sequence[int],
        output: Sequence[int],
        max_tokens: int,
        boundaries: Sequence[int],
        finish: Finish | None,
        extras: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        """One request that has ended, however it did. A disk that is full ends the log, not the gateway. O(tokens)."""
        if self._file is None:
            return
        num_joined = max(1, _TOKENS_PER_HASH // block_size)
        hashes = hash_blocks(root, (*prompt, *output), block_size, extras)
        fields = {
            "cidery": VERSION,
            "at": round(at_s, 3),
            "model": model,
            "prompt": len(prompt),
            "output": len(output),
            "max": max_tokens,
            "block": num_joined * block_size,
            "hashes": base64.b64encode(b"".join(map(self._keyed, hashes[num_joined - 1 :: num_joined]))).decode(),
            "ends": list(boundaries),
            "finish": finish.name.lower() if finish else "none",
        }
        try:
            self._file.write(json.dumps(fields, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            log.error("request log ends path=%s error=%s", self._path, error)
            self.close()

    def close(self) -> None:
        """Nothing is written after that."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                log.error("request log is incomplete path=%s error=%s", self._path, error)

    def _keyed(self, block_hash: BlockHash) -> bytes:
        return blake2b(block_hash, key=self._secret, digest_size=HASH_BYTES).digest()
