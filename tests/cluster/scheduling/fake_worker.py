"""A worker whose KV is a token and a position per slot: any read of a wrong, stale or unwritten block is caught."""

from array import array
from zlib import crc32

from cluster.kv.hashing import BlockHash, hash_block, hash_blocks, root_hash
from cluster.scheduling.plan import FilledBlock, NewSequence, Sampled, Slice, StepPlan, StepResult
from cluster.scheduling.request import Request, TokenLogprobs

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


class _Sequence:
    def __init__(self, new: NewSequence, block_size: int) -> None:
        assert len(new.block_hashes) <= len(new.token_ids) // block_size
        self.new = new
        self.tokens = list(new.token_ids)
        self.hashes = list(new.block_hashes)
        self.table = list(new.block_tables[0])
        self.num_computed = len(self.table) * block_size
        self.stopped = False
        assert self.num_computed < len(self.tokens), "one token must run"


class FakeWorker:
    """Executes plans strictly in order, as worker.proto tells."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.root = fake_root(block_size)
        self.slots: dict[int, tuple[int, int]] = {}
        self.sequences: dict[int, _Sequence] = {}
        self.seen_seq_ids: set[int] = set()
        self.num_run_tokens = 0

    def run(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.released_seq_ids:
            del self.sequences[seq_id]
        for new in plan.new_sequences:
            assert new.seq_id not in self.seen_seq_ids, "seq_ids are unique"
            assert (
                new.block_hashes
                == tuple(hash_blocks(self.root, new.token_ids, self.block_size))[: len(new.block_hashes)]
            )
            self.seen_seq_ids.add(new.seq_id)
            self.sequences[new.seq_id] = _Sequence(new, self.block_size)
        sampled: list[Sampled] = []
        filled: list[FilledBlock] = []
        skipped: list[int] = []
        assert len({s.seq_id for s in plan.slices}) == len(plan.slices), "one slice a sequence"
        for part in plan.slices:
            sequence = self.sequences[part.seq_id]
            if sequence.stopped:
                assert part.samples
                skipped.append(part.seq_id)
                continue
            self._run_slice(sequence, part)
            filled += self._filled(sequence, part)
            if part.samples:
                sampled.append(self._sample(sequence, part))
        return StepResult(plan.step_id, tuple(sampled), tuple(filled), tuple(skipped))

    def _run_slice(self, sequence: _Sequence, part: Slice) -> None:
        sequence.table += part.new_blocks.get(0, ())
        assert part.num_tokens >= 1
        assert part.start == sequence.num_computed, "positions run one after another"
        end = part.start + part.num_tokens
        assert end <= len(sequence.tokens), "a token is run before it is known"
        for position in range(part.start, end):
            self.slots[self._slot(sequence, position)] = (sequence.tokens[position], position)
        for position in range(end):
            read = self.slots.get(self._slot(sequence, position))
            assert read == (sequence.tokens[position], position), f"position {position} reads {read}"
        sequence.num_computed = end
        self.num_run_tokens += part.num_tokens

    def _slot(self, sequence: _Sequence, position: int) -> int:
        block_id = sequence.table[position // self.block_size]
        assert 0 < block_id < self.num_blocks, "the null block is never touched"
        return block_id * self.block_size + position % self.block_size

    def _filled(self, sequence: _Sequence, part: Slice) -> list[FilledBlock]:
        filled = []
        size = self.block_size
        for index in range(part.start // size, sequence.num_computed // size):
            if index == len(sequence.hashes):
                parent: BlockHash = sequence.hashes[-1] if index else self.root
                sequence.hashes.append(hash_block(parent, sequence.tokens[index * size : (index + 1) * size]))
            filled.append(FilledBlock(part.seq_id, 0, index, sequence.table[index], sequence.hashes[index]))
        return filled

    def _sample(self, sequence: _Sequence, part: Slice) -> Sampled:
        assert sequence.num_computed == len(sequence.tokens), "only the token after the last is sampled"
        token = next_token(sequence.tokens)
        sequence.tokens.append(token)
        sequence.stopped = token in sequence.new.stop_token_ids
        wants = sequence.new.sampling.num_top_logprobs is not None
        return Sampled(part.seq_id, token, TokenLogprobs(token, -1.0) if wants else None, sequence.stopped)
