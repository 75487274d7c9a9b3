"""A smaller model that guesses how sequences go on, a few tokens a step, for the served model to verify.

It runs over paged KV of its own, of a fixed size, all sequences together: one forward for each token that is guessed.
What it has computed of a sequence is kept from step to step; a sequence that is new to it catches up in chunks, and who
was not served for longest gives way. Nothing of it is ever seen outside: wrong or missing guesses cost time only.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from worker import models
from worker.attention import Step
from worker.batch import Batch, Span
from worker.errors import UnsupportedModelError
from worker.kv_shapes import CacheGroup, LayerShape
from worker.kv_tensors import KVTensors
from worker.metal.dispatch import Kernels
from worker.models import Layout, LoadedModel

# Memory of its KV, at most: of the machine one part in so many, and never more than this.
KV_SHARE = 20
MAX_KV_BYTES = 1 << 30
BLOCK_SIZE = 16
# Rows of one forward while sequences catch up: a step waits for it.
_MAX_ROWS = 512
_TIME_WEIGHT = 1 / 16


@dataclass(frozen=True, slots=True)
class Wanted:
    """Guesses for a sequence that has these tokens."""

    token_ids: Sequence[int]
    num_drafts: int


@dataclass(slots=True)
class _Followed:
    """What has run of a sequence: tokens whose keys and values are in its blocks; of those, some are certain."""

    blocks: list[int] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    num_certain: int = 0

    def agree(self, token_ids: Sequence[int]) -> None:
        """Forget what ran of guesses that did not come true."""
        place, end = self.num_certain, min(len(self.run), len(token_ids))
        while place < end and self.run[place] == token_ids[place]:
            place += 1
        # The newest token runs anew, if it ran: its logits are gone.
        self.num_certain = min(place, len(token_ids) - 1)
        del self.run[self.num_certain :]


class DraftModel:
    """See the module."""

    def __init__(self, loaded: LoadedModel, kernels: Kernels, *, vocab_size: int, kv_bytes: int) -> None:
        """Guesses tokens below `vocab_size`, that of the served model.

        Raises UnsupportedModelError for a model with recurrent states, or one that runs one sequence at a time.
        """
        if loaded.has_states or loaded.layout is Layout.DENSE:
            why = "it has recurrent states" if loaded.has_states else "it runs one sequence at a time"
            raise UnsupportedModelError(f"{loaded.family} can't be a draft model: {why}")
        self._loaded = loaded
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._step = Step(kernels)
        self._caches = models.attach(loaded, self._step)
        token_bytes = sum(shape.token_bytes for shape in loaded.caches if isinstance(shape, LayerShape))
        # The null block and room for one guess of one block at the least.
        num_blocks = max(3, kv_bytes // (token_bytes * BLOCK_SIZE))
        group = CacheGroup(0, tuple(range(len(loaded.caches))))
        self._tensors = KVTensors(
            loaded.caches,
            groups=[group],
            num_blocks=[num_blocks],
            block_size=BLOCK_SIZE,
            writer=kernels.make_writer(),
        )
        self._num_blocks = num_blocks
        self._free: list[int] = []
        # Those that were served last come last.
        self._followed: dict[int, _Followed] = {}
        # Of one guess of all sequences of a step; 0.0 until one has run.
        self.token_s = 0.0
        self.reset()

    @property
    def num_bytes(self) -> int:
        """Of weights and KV together."""
        return self._loaded.weights_bytes + self._tensors.total_bytes

    def reset(self) -> None:
        """No sequence lives on."""
        self._followed.clear()
        # Low ids first, so that no more memory is committed than is needed.
        self._free = list(range(self._num_blocks - 1, 0, -1))

    def forget(self, seq_id: int) -> None:
        """The sequence has ended, if it was ever here."""
        followed = self._followed.pop(seq_id, None)
        if followed is not None:
            self._free += followed.blocks

    def propose(self, wanted: Mapping[int, Wanted]) -> dict[int, list[int]]:
        """Guesses by sequence, the likeliest token each time; none for those that are still catching up."""
        spans = self._first_spans(wanted)
        drafts: dict[int, list[int]] = {seq_id: [] for seq_id, span in spans.items() if span.samples}
        while spans:
            is_first = not any(drafts.values())
            started_s = time.perf_counter()
            drawn = self._forward(spans)
            if not is_first:
                seconds = time.perf_counter() - started_s
                self.token_s += (_TIME_WEIGHT if self.token_s else 1.0) * (seconds - self.token_s)
            spans = {}
            for seq_id, token_id in drawn.items():
                drafts[seq_id].append(token_id)
                if len(drafts[seq_id]) < wanted[seq_id].num_drafts:
                    spans[seq_id] = self._span(self._followed[seq_id], [token_id], samples=True)
        return drafts

    def _first_spans(self, wanted: Mapping[int, Wanted]) -> dict[int, Span]:
        """What each sequence has not run yet, as far as there are blocks and rows for it."""
        for seq_id, asked in wanted.items():
            followed = self._followed.pop(seq_id) if seq_id in self._followed else _Followed()
            followed.agree(asked.token_ids)
            self._followed[seq_id] = followed
        spans: dict[int, Span] = {}
        num_rows = _MAX_ROWS
        # Who has a long way to catch up keeps nobody else from guessing.
        for seq_id in sorted(wanted, key=lambda each: len(wanted[each].token_ids) - self._followed[each].num_certain):
            asked, followed = wanted[seq_id], self._followed[seq_id]
            missing = asked.token_ids[followed.num_certain : followed.num_certain + num_rows]
            is_whole = followed.num_certain + len(missing) == len(asked.token_ids)
            end = len(asked.token_ids) + asked.num_drafts
            has_room = end <= self._loaded.max_model_len and self._make_room(followed, end, wanted)
            # The served model's table may be padded beyond this one's.
            if missing and has_room and max(missing) < self._loaded.vocab_size:
                num_rows -= len(missing)
                spans[seq_id] = self._span(followed, missing, samples=is_whole)
        return spans

    def _make_room(self, followed: _Followed, num_tokens: int, wanted: Mapping[int, Wanted]) -> bool:
        """Blocks for so many tokens, from those that nobody asks for if need be."""
        num_missing = -(-num_tokens // BLOCK_SIZE) - len(followed.blocks)
        while num_missing > len(self._free):
            other = next((seq_id for seq_id in self._followed if seq_id not in wanted), None)
            if other is None:
                return False
            self.forget(other)
        for _ in range(num_missing):
            followed.blocks.append(self._free.pop())
            self._tensors.reserve(0, followed.blocks[-1])
        return True

    def _span(self, followed: _Followed, token_ids: Sequence[int], *, samples: bool) -> Span:
        start = len(followed.run)
        followed.run += token_ids
        return Span(token_ids, start, followed.blocks, samples, [followed.blocks])

    def _forward(self, spans: Mapping[int, Span]) -> dict[int, int]:
        """The likeliest token after each span that samples."""
        batch = Batch(
            list(spans.values()),
            block_size=BLOCK_SIZE,
            decodes_together=self._kernels.takes_ragged_rows,
            allows_flat=self._loaded.layout is Layout.FLAT,
        )
        self._step.begin(batch, self._tensors)
        logits = self._loaded.model(batch.tokens, cache=self._caches.nested)
        self._caches.forget()
        seq_ids = list(spans)
        sampling = [seq_ids[index] for index in batch.order if spans[seq_ids[index]].samples]
        tokens = mx.zeros(0, mx.int32)
        if sampling:
            tokens = mx.argmax(models.sampled_logits(logits, batch)[:, : self._vocab_size], axis=-1)
        self._tensors.evaluate(tokens)
        self._step.end()
        found: list[int] = tokens.tolist()  # type: ignore[assignment]
        return dict(zip(sampling, found, strict=True))


def check_tokens(target: Path, draft: Path) -> None:
    """Raises UnsupportedModelError unless both folders' tokenizers have the same tokens."""
    ours, theirs = (_vocabulary(folder) for folder in (target, draft))
    if ours != theirs:
        number = sum(ours.get(token) != token_id for token, token_id in theirs.items())
        raise UnsupportedModelError(
            f"draft model {draft}: {number} of its {len(theirs)} tokens are not those of {target}, which has "
            f"{len(ours)}; a draft model needs the same tokenizer"
        )


def _vocabulary(folder: Path) -> dict[str, int]:
    from mlx_lm.utils import load_tokenizer

    path = folder / "tokenizer.json"
    if path.is_file():
        vocabulary = json.loads(path.read_text())["model"]["vocab"]
        return dict(vocabulary) if isinstance(vocabulary, dict) else {piece[0]: i for i, piece in enumerate(vocabulary)}
    tokenizer = load_tokenizer(folder)  # type: ignore[no-untyped-call]
    return dict(tokenizer.get_vocab())
