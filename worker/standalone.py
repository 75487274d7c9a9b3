"""The engine alone, without a cluster: answers one prompt. For debugging a model or the engine."""

import time
from dataclasses import dataclass
from typing import Any

from protos.cidery.v1.sampling_pb2 import SamplingParams
from protos.cidery.worker.v1 import worker_pb2 as pb
from worker.engine import Engine

_BLOCK_SIZE = 16
_CHUNK_TOKENS = 512
_SEQ_ID = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids without the stop token, and how long prompt and generation took."""

    token_ids: list[int]
    num_prompt_tokens: int
    prefill_s: float
    decode_s: float

    def __str__(self) -> str:
        prefill = self.num_prompt_tokens / self.prefill_s
        decode = (len(self.token_ids) - 1) / self.decode_s if len(self.token_ids) > 1 else 0.0
        return (
            f"prompt {self.num_prompt_tokens} tokens, {prefill:.1f} tokens/s; "
            f"answer {len(self.token_ids)} tokens, {decode:.1f} tokens/s"
        )


def answer(engine: Engine, prompt: list[int], *, max_tokens: int, sampling: SamplingParams) -> Answer:
    """Run one sequence to its end: a stop token or `max_tokens`."""
    num_blocks = 1 + -(-(len(prompt) + max_tokens) // _BLOCK_SIZE)
    tables = configure(engine, num_blocks)
    sequence = pb.NewSequence(
        seq_id=_SEQ_ID,
        token_ids=prompt,
        sampling=sampling,
        stop_token_ids=engine.describe().eos_token_ids,
    )
    plan = pb.StepPlan(new_sequences=[sequence])
    # The whole table at once: with a single sequence there is nothing to share blocks with.
    started_s = time.perf_counter()
    for start in range(0, len(prompt), _CHUNK_TOKENS):
        size = min(_CHUNK_TOKENS, len(prompt) - start)
        piece = plan.slices.add(seq_id=_SEQ_ID, start=start, num_tokens=size, samples=start + size == len(prompt))
        if start == 0:
            piece.new_blocks.extend(tables)
        result = engine.execute(plan)
        plan = pb.StepPlan()
    prefilled_s = time.perf_counter()
    token_ids: list[int] = []
    while not result.sampled[0].stopped:
        token_ids.append(result.sampled[0].token_id)
        if len(token_ids) == max_tokens:
            break
        position = len(prompt) + len(token_ids) - 1
        step = pb.Slice(seq_id=_SEQ_ID, start=position, num_tokens=1, samples=True)
        result = engine.execute(pb.StepPlan(slices=[step]))
    return Answer(token_ids, len(prompt), prefilled_s - started_s, time.perf_counter() - prefilled_s)


def configure(engine: Engine, num_blocks: int) -> list[pb.GroupBlocks]:
    """Every token and one state of one sequence; returns its block tables."""
    layers = engine.describe().layers
    states = [index for index, layer in enumerate(layers) if layer.states]
    attention = [index for index, layer in enumerate(layers) if not layer.states]
    kinds = [(caches, size) for caches, size in ((attention, num_blocks), (states, 1)) if caches]
    configure = pb.Configure(block_size=_BLOCK_SIZE, root_hash=bytes(16))
    for pool, (caches, size) in enumerate(kinds):
        configure.groups.add(pool=pool, layers=caches)
        configure.num_blocks.append(size + 1)
    engine.configure(configure)
    return [pb.GroupBlocks(group=group, block_ids=range(1, size + 1)) for group, (_, size) in enumerate(kinds)]


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """The prompt's tokens, as one user message when the model has a chat template."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    return list(tokenizer.encode(prompt))
