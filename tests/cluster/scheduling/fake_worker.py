"""A worker whose KV is a token and a position per slot, and whose states are the tokens they stand for.

Any read of a wrong, stale or unwritten block is caught, in models of any kinds of layers.
"""

from array import array
from random import Random
from zlib import crc32

from cluster.kv.group_managers import make_manager
from cluster.kv.hashing import hash_block, hash_blocks, join_hashes, root_hash, split_hashes
from cluster.kv.layout import KVLayout
from cluster.scheduling.plan import (
    FilledBlock,
    NewSequence,
    PromptLogprobs,
    Sampled,
    Slice,
    Speculated,
    StepPlan,
    StepResult,
)
from cluster.scheduling.request import Pooling, Request, TokenLogprobs

VOCAB_SIZE = 11


def fake_root(block_size):
    return root_hash(model="fake", tokenizer="fake", kv_format="token", block_size=block_size)


def next_token(token_ids):
    """The deterministic model: depends on every token before."""
    return crc32(array("I", token_ids).tobytes()) % VOCAB_SIZE


def undisturbed(request: Request, max_model_len: int) -> list[int]:
    """What the request generates when nothing else runs, from its first prompt token on."""
    tokens = list(request.token_ids[: request.num_prompt_tokens])
    limit = min(request.num_prompt_tokens + request.max_tokens, max_model_len)
    while len(tokens) < limit:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens[request.num_prompt_tokens :]


def score(token_ids, position):
    """The log-probability of a token of a prompt; depends on all before it."""
    return -float(crc32(array("I", token_ids[: position + 1]).tobytes()) % 1000)


def pooled(how, token_ids):
    """The vector of a prompt."""
    tokens = {Pooling.MEAN: token_ids, Pooling.LAST: token_ids[-1:], Pooling.CLS: token_ids[:1]}[how]
    return tuple(map(float, tokens))


class _Sequence:
    def __init__(self, new: NewSequence, block_size: int) -> None:
        assert len(new.block_hashes) // 16 <= len(new.token_ids) // block_size
        self.new = new
        self.tokens = list(new.token_ids)
        self.hashes = split_hashes(new.block_hashes)
        self.tables = {group: list(ids) for group, ids in new.block_tables.items()}
        self.num_computed: int | None = None
        self.num_drafts = 0
        self.stopped = False
        self.pooled: list[int] = []


class Guesser:
    """Drafts of which each is right with a probability; by turns it wants many, few or none."""

    def __init__(self, seed: int, *, share_right: float = 0.7, most: int = 4) -> None:
        self.random = Random(seed)
        self.share_right = share_right
        self.most = most

    def num_wanted(self) -> int:
        return self.random.randint(0, self.most)

    def guess(self, tokens: list[int], num_most: int, stops) -> list[int]:
        drafts: list[int] = []
        while len(drafts) < num_most:
            right = next_token([*tokens, *drafts])
            token = right if self.random.random() < self.share_right else (right + 1) % VOCAB_SIZE
            if token in stops:
                break
            drafts.append(token)
        return drafts[: self.random.randint(0, num_most)] if self.random.random() < 0.2 else drafts


class FakeWorker:
    """Executes plans strictly in order, as worker.proto tells."""

    def __init__(self, layout: KVLayout, guesser: Guesser | None = None) -> None:
        self.layout = layout
        self.guesser = guesser
        self.num_drafts = self.num_accepted = 0
        self.block_size = layout.block_size
        self.managers = [make_manager(group, layout.block_size) for group in layout.groups]
        self.num_blocks = [pool.num_blocks for pool in layout.pools]
        self.root = fake_root(layout.block_size)
        # (pool, block id) -> {offset: (token, position)}, or the tokens that a state stands for.
        self.memory: dict[tuple[int, int], object] = {}
        self.sequences: dict[int, _Sequence] = {}
        self.seen_seq_ids: set[int] = set()
        self.num_run_tokens = 0

    def run(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.released_seq_ids:
            del self.sequences[seq_id]
        self._resize(plan)
        for edit in plan.edits:
            self.sequences[edit.seq_id].tables[edit.group][edit.index] = edit.block_id
        for new in plan.new_sequences:
            assert new.seq_id not in self.seen_seq_ids, "seq_ids are unique"
            hashes = join_hashes(hash_blocks(self.root, new.token_ids, self.block_size))
            assert new.block_hashes == hashes[: len(new.block_hashes)]
            self.seen_seq_ids.add(new.seq_id)
            self.sequences[new.seq_id] = _Sequence(new, self.block_size)
        self._copy(plan)
        sampled: list[Sampled] = []
        filled: list[FilledBlock] = []
        skipped: list[int] = []
        speculated: list[Speculated] = []
        scores: list[PromptLogprobs] = []
        assert len({s.seq_id for s in plan.slices}) == len(plan.slices), "one slice a sequence"
        for part in plan.slices:
            sequence = self.sequences[part.seq_id]
            if sequence.stopped:
                assert part.samples
                skipped.append(part.seq_id)
                continue
            first = len(sampled)
            start, drafts = self._open(sequence, part)
            self._run_slice(sequence, part, start, drafts)
            if sequence.new.reading is not None:
                scores += self._read(sequence, part)
            if part.samples and sequence.new.reads_only:
                sampled.append(self._finish_reading(sequence))
            elif part.samples:
                sampled += self._sample(sequence, part, start, drafts)
            filled += self._filled(sequence, start)
            if self.guesser is not None and part.samples:
                self.num_drafts += len(drafts)
                self.num_accepted += len(sampled) - first - 1
                speculated.append(Speculated(part.seq_id, len(drafts), self.guesser.num_wanted()))
        return StepResult(
            plan.step_id,
            tuple(sampled),
            tuple(filled),
            tuple(skipped),
            run_s=0.01,
            speculated=tuple(speculated),
            prompt_logprobs=tuple(scores),
        )

    def _open(self, sequence: _Sequence, part: Slice) -> tuple[int, list[int]]:
        """Where the slice really begins, and what is guessed behind it."""
        if self.guesser is None or not part.samples or part.num_tokens > 1 or sequence.num_computed is None:
            assert part.max_drafts == 0
            return part.start, []
        assert sequence.num_computed <= len(sequence.tokens) - 1 <= part.start
        if any(manager.is_state for manager in self.managers):
            assert len(sequence.tokens) - 1 == part.start, "states need a plan that knows where it is"
            assert part.start // self.block_size == (part.start + part.max_drafts) // self.block_size
        return sequence.num_computed, self.guesser.guess(sequence.tokens, part.max_drafts, sequence.new.stop_token_ids)

    def _read(self, sequence: _Sequence, part: Slice) -> list[PromptLogprobs]:
        """Rows that ran are all that can be read of; whoever wants more has been given a cached prefix wrongly."""
        reading, tokens = sequence.new.reading, sequence.tokens
        assert reading is not None
        end = part.start + part.num_tokens
        if reading.pooling is Pooling.MEAN:
            assert len(sequence.pooled) == part.start, "a row of the mean was skipped"
            sequence.pooled += tokens[part.start : end]
        elif reading.pooling is Pooling.CLS and part.start == 0:
            sequence.pooled = tokens[:1]
        elif reading.pooling is Pooling.LAST:
            sequence.pooled = tokens[end - 1 : end]
        if reading.num_top_logprobs is None:
            return []
        positions = range(max(part.start + 1, reading.first_scored), min(end + 1, sequence.new.num_prompt_tokens))
        if not positions:
            return []
        logprobs = tuple(score(tokens, position) for position in positions)
        return [PromptLogprobs(part.seq_id, positions.start, logprobs, ((),) * len(positions))]

    def _finish_reading(self, sequence: _Sequence) -> Sampled:
        sequence.stopped = True
        embedding = tuple(map(float, sequence.pooled))
        return Sampled(sequence.new.seq_id, 0, None, True, is_read=True, embedding=embedding)

    def _resize(self, plan: StepPlan) -> None:
        for resize in plan.resizes:
            pool, moves = resize.pool_id, dict(resize.moves)
            moved = {target: self.memory.pop((pool, source), None) for source, target in moves.items()}
            self.memory.update({(pool, target): content for target, content in moved.items()})
            self.num_blocks[pool] = resize.num_blocks
            for sequence in self.sequences.values():
                for group in self.layout.pools[pool].group_ids:
                    sequence.tables[group] = [moves.get(b, b) for b in sequence.tables.get(group, ())]
        budget = sum(n * pool.page_bytes for n, pool in zip(self.num_blocks, self.layout.pools, strict=True))
        assert budget <= self.layout.budget_bytes, "the pools outgrow the budget"

    def _copy(self, plan: StepPlan) -> None:
        read = [self.memory[self._key(copy.group, copy.source)] for copy in plan.copies]
        for copy, content in zip(plan.copies, read, strict=True):
            self.memory[self._key(copy.group, copy.target)] = dict(content) if isinstance(content, dict) else content
        for group, ids in (plan.zeroes or {}).items():
            for block_id in ids:
                self.memory[self._key(group, block_id)] = ()

    def _key(self, group: int, block_id: int) -> tuple[int, int]:
        pool = self.layout.groups[group].pool_id
        assert 0 < block_id < self.num_blocks[pool], f"block {block_id} is not one of {self.num_blocks[pool]}"
        return pool, block_id

    def _run_slice(self, sequence: _Sequence, part: Slice, start: int, drafts: list[int]) -> None:
        assert part.num_tokens >= 1
        assert start == sequence.num_computed or sequence.num_computed is None, "positions run in order"
        known = start + part.num_tokens if sequence.num_computed is None or not part.samples else len(sequence.tokens)
        assert known <= len(sequence.tokens), "a token is run before it is known"
        tokens = [*sequence.tokens[:known], *drafts]
        end = len(tokens)
        for manager in self.managers:
            group = manager.group_id
            table = sequence.tables.setdefault(group, [])
            table += part.new_blocks.get(group, ())
            if manager.is_state:
                key = self._key(group, table[0])
                assert self.memory[key] == tuple(tokens[:start]), f"group {group}: a wrong state"
                self.memory[key] = tuple(tokens)
                continue
            for position in range(start, end):
                content = self.memory.setdefault(self._key(group, table[position // self.block_size]), {})
                if not isinstance(content, dict):
                    content = self.memory[self._key(group, table[position // self.block_size])] = {}
                content[position % self.block_size] = (tokens[position], position)
            first = manager.first_needed(start) * self.block_size
            sinks = range(min(manager.num_sink_blocks * self.block_size, end))
            for position in {*sinks, *range(first, end)}:
                content = self.memory[self._key(group, table[position // self.block_size])]
                assert isinstance(content, dict)
                read = content.get(position % self.block_size)
                assert read == (tokens[position], position), f"group {group}: position {position} reads {read}"
        sequence.num_computed = known
        self.num_run_tokens += end - start

    def _filled(self, sequence: _Sequence, start: int) -> list[FilledBlock]:
        filled = []
        size = self.block_size
        assert sequence.num_computed is not None
        for index in range(start // size, sequence.num_computed // size):
            if index == len(sequence.hashes):
                parent = sequence.hashes[-1] if index else self.root
                sequence.hashes.append(hash_block(parent, sequence.tokens[index * size : (index + 1) * size]))
            filled.append(FilledBlock(sequence.new.seq_id, index, sequence.hashes[index]))
        return filled

    def _sample(self, sequence: _Sequence, part: Slice, start: int, drafts: list[int]) -> list[Sampled]:
        assert sequence.num_computed == len(sequence.tokens), "only the token after the last is sampled"
        wants = sequence.new.sampling.num_top_logprobs is not None
        sampled: list[Sampled] = []
        for draft in [*drafts, None]:
            token = next_token(sequence.tokens)
            sequence.tokens.append(token)
            sequence.stopped = token in sequence.new.stop_token_ids
            logprobs = TokenLogprobs(token, -1.0) if wants else None
            sampled.append(Sampled(part.seq_id, token, logprobs, sequence.stopped))
            if token != draft:
                break
        sequence.num_computed = len(sequence.tokens) - 1
        states = [self._key(m.group_id, sequence.tables[m.group_id][0]) for m in self.managers if m.is_state]
        if states and len(sampled) <= len(drafts):
            # The state has seen a guess that was wrong: back to the one before, and run again what was right.
            sequence.num_computed = start
            for key in states:
                self.memory[key] = tuple(sequence.tokens[:start])
        return sampled
