"""A smaller model that guesses how sequences go on, a few tokens a step, for the served model to verify.

It runs over paged KV of its own, of a fixed size, all sequences together: one forward for each token that is guessed,
or fewer where what the model would say can be looked up, since one forward over tokens that were looked up tells how
many of them it would have said. What it has computed of a sequence is kept from step to step; a sequence that is new to
it catches up in chunks. Nothing of it is ever seen outside: wrong or missing guesses cost time only.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import mlx.core as mx

from worker import mixers, models
from worker.attention import Step
from worker.batch import Batch, Span
from worker.draft_memory import BLOCK_SIZE as BLOCK_SIZE
from worker.draft_memory import DraftMemory, Followed, Guess
from worker.drafting import Outlook
from worker.errors import UnsupportedModelError
from worker.evaluation import Inline
from worker.metal.dispatch import Kernels
from worker.models import Layout, LoadedModel

# Memory of its KV, at most: of the machine one part in so many, and never more than this.
KV_SHARE = 20
MAX_KV_BYTES = 1 << 30
# Rows of one forward while sequences catch up: a step waits for it.
_MAX_ROWS = 512
_TIME_WEIGHT = 1 / 16


@dataclass(frozen=True, slots=True)
class Wanted:
    """Guesses for a sequence that has these tokens. `likely`: how it goes on, perhaps; they cost little to check.

    Guessing ends early once `outlook` says that no further guess pays.
    """

    token_ids: Sequence[int]
    num_drafts: int
    likely: Sequence[int] = ()
    outlook: Outlook | None = None

    def is_worth_another(self, guesses: Sequence[Guess]) -> bool:
        """A guess behind these, as far as that is known."""
        return self.outlook is None or self.outlook.is_good([guess.confidence for guess in guesses])


class DraftModel:
    """See the module."""

    def __init__(self, loaded: LoadedModel, kernels: Kernels, *, vocab_size: int, kv_bytes: int) -> None:
        """Guesses tokens below `vocab_size`, that of the served model.

        Raises UnsupportedModelError for a model that runs one sequence at a time.
        """
        if loaded.layout is Layout.DENSE:
            raise UnsupportedModelError(f"{loaded.family} can't be a draft model: it runs one sequence at a time")
        self._loaded = loaded
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._step = Step(kernels)
        self._caches = models.attach(loaded, self._step)
        self._memory = DraftMemory(loaded.caches, kernels.make_writer(Inline()), kv_bytes)
        self._tensors = self._memory.tensors
        # Of one guess of all sequences of a step; 0.0 until one has run.
        self.token_s = 0.0

    @property
    def num_bytes(self) -> int:
        """Of weights and KV together."""
        return self._loaded.weights_bytes + self._tensors.total_bytes

    def reset(self) -> None:
        """No sequence lives on."""
        self._memory.reset()

    def forget(self, seq_id: int) -> None:
        """The sequence has ended, if it was ever here."""
        self._memory.forget(seq_id)

    def propose(self, wanted: Mapping[int, Wanted]) -> dict[int, list[Guess]]:
        """Guesses by sequence, the likeliest token each time; none for those that are still catching up."""
        started_s = time.perf_counter()
        followed = {seq_id: self._memory.serve(seq_id, asked.token_ids) for seq_id, asked in wanted.items()}
        guesses = {
            seq_id: [each.next_guess]
            for seq_id, each in followed.items()
            if each.next_guess is not None and self._has_room(wanted[seq_id], each, wanted)
        }
        spans = self._first_spans(wanted, followed)
        is_usual = all(len(span.token_ids) <= 2 + 2 * wanted[seq_id].num_drafts for seq_id, span in spans.items())
        for seq_id, found in self._forward(spans).items():
            looked_up = spans[seq_id].drafts
            num_confirmed = _num_confirmed(looked_up, found)
            followed[seq_id].take(found[0], num_wrong=len(looked_up) - num_confirmed)
            guesses[seq_id] = found[: num_confirmed + 1]
        spans = self._next_spans(wanted, followed, guesses)
        self._fork([followed[seq_id] for seq_id in spans])
        while spans:
            for seq_id, found in self._forward(spans).items():
                guesses[seq_id] += found
            spans = self._next_spans(wanted, followed, guesses)
        if guesses and is_usual:
            seconds = (time.perf_counter() - started_s) / max(map(len, guesses.values()))
            self.token_s += (_TIME_WEIGHT if self.token_s else 1.0) * (seconds - self.token_s)
        return guesses

    def _first_spans(self, wanted: Mapping[int, Wanted], followed: Mapping[int, Followed]) -> dict[int, Span]:
        """What each sequence has not run yet, as far as there are blocks and rows for it."""
        spans: dict[int, Span] = {}
        num_rows = _MAX_ROWS
        # Who has a long way to catch up keeps nobody else from guessing.
        for seq_id in sorted(wanted, key=lambda each: len(wanted[each].token_ids) - followed[each].num_certain):
            asked, each = wanted[seq_id], followed[seq_id]
            missing = asked.token_ids[each.num_certain : each.num_certain + num_rows]
            # The served model's table may be padded beyond this one's.
            if not missing or max(missing) >= self._loaded.vocab_size or not self._has_room(asked, each, wanted):
                continue
            is_whole = each.num_certain + len(missing) == len(asked.token_ids)
            likely: Sequence[int] = ()
            if is_whole and not self._memory.has_states and max(asked.likely, default=0) < self._loaded.vocab_size:
                likely = asked.likely[: min(asked.num_drafts - 1, num_rows - len(missing))]
            num_rows -= len(missing) + len(likely)
            spans[seq_id] = each.span([*missing, *likely], samples=is_whole, num_drafts=len(likely))
            each.num_certain += len(missing)
        return spans

    def _has_room(self, asked: Wanted, followed: Followed, wanted: Mapping[int, Wanted]) -> bool:
        """For the sequence and its guesses, in the model's context and in memory."""
        end = len(asked.token_ids) + asked.num_drafts
        return end <= self._loaded.max_model_len and self._memory.make_room(followed, end, wanted)

    def _next_spans(
        self, wanted: Mapping[int, Wanted], followed: Mapping[int, Followed], guesses: Mapping[int, list[Guess]]
    ) -> dict[int, Span]:
        """The last guesses of those that want another."""
        return {
            seq_id: followed[seq_id].span([found[-1].token_id], samples=True, is_guess=True)
            for seq_id, found in guesses.items()
            if len(found) < wanted[seq_id].num_drafts and wanted[seq_id].is_worth_another(found)
        }

    def _fork(self, followed: Sequence[Followed]) -> None:
        """Let guesses go on from the states that the tokens have left."""
        if self._memory.has_states and followed:
            self._tensors.settle_states()
            pairs = [each.states for each in followed]
            self._tensors.copy_blocks(
                self._memory.state_group, [one for one, _ in pairs], [other for _, other in pairs]
            )

    def _forward(self, spans: Mapping[int, Span]) -> dict[int, list[Guess]]:
        """The likeliest tokens after the rows of each span that sample."""
        if not spans:
            return {}
        batch = Batch(
            list(spans.values()),
            block_size=BLOCK_SIZE,
            decodes_together=self._kernels.takes_ragged_rows,
            allows_flat=self._loaded.layout is Layout.FLAT,
        )
        self._step.begin(batch, self._tensors)
        with mixers.states_of(self._caches.states, self._step):
            logits = self._loaded.model(batch.tokens, cache=self._caches.nested)
        self._caches.forget()
        tokens, chances = mx.zeros(0, mx.int32), mx.zeros(0)
        if batch.sampled_rows:
            sampled = models.sampled_logits(logits, batch)[:, : self._vocab_size]
            tokens = mx.argmax(sampled, axis=-1)
            # In float32: of half precision, log-sum-exp over a large vocabulary says little.
            sampled = sampled.astype(mx.float32)
            chances = mx.exp(mx.max(sampled, axis=-1) - mx.logsumexp(sampled, axis=-1))
        self._tensors.evaluate(tokens, chances)
        self._step.end()
        drawn = map(Guess, tokens.tolist(), chances.tolist())  # type: ignore[arg-type]
        seq_ids = list(spans)
        rows = [(seq_ids[index], spans[seq_ids[index]]) for index in batch.order]
        return {seq_id: list(islice(drawn, 1 + span.num_drafts)) for seq_id, span in rows if span.samples}


def _num_confirmed(looked_up: Sequence[int], said: Sequence[Guess]) -> int:
    """How many of the tokens that were looked up are what the model says."""
    pairs = zip(looked_up, said, strict=False)
    return next((place for place, (token_id, guess) in enumerate(pairs) if token_id != guess.token_id), len(looked_up))


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
