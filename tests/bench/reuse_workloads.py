"""Workloads of the reuse benchmark: requests in order, as tokens, with what an unbounded cache would hit of each.

"cyclic": 24 sessions of 6 turns, turn t of all of them before turn t + 1, one system prompt of 1,500 tokens for all. A
turn adds 380 tokens of a user and 280 of an answer, each within 20 %: 5,460 tokens a session at the end, 131,000 in all
with the system prompt counted in each session and 96,500 with it counted once. "cyclic-long" has 550 and 350: 131,000
with it counted once.

"agentic": real coding-agent sessions by their block ids, drawn by families with the same tools and system prompt, whose
first blocks are the same. Sessions start at seeded moments, their requests run in order
of time. A block id stands for 64 tokens; what is left of the prompt after its last whole block is dropped. Answers are
not in the traces: where the lane's next prompt goes on after this one, the answer is what stands there, up to
`max_answer_tokens`; elsewhere it is fresh tokens.
"""

import gzip
import json
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.kv.hashing import BlockHash, hash_block, root_hash
from tests.bench.reuse_prefixes import Tokens, num_common

BLOCK_SIZE = 16
TRACE_FILE = Path("agentic") / "claude_code_sessions.rle.jsonl.gz"
_ROOT = root_hash(model="reuse", tokenizer="reuse", kv_format="reuse", block_size=BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: `token_ids` is the prompt followed by the answer, `block_hashes` are those of its full blocks.

    `boundaries` are offsets inside the prompt where a message, the tools or the system prompt end.
    """

    session: int
    token_ids: Tokens
    num_prompt_tokens: int
    block_hashes: tuple[BlockHash, ...]
    boundaries: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order in which they come, one at a time."""

    name: str
    turns: list[Turn]
    about: dict[str, Any]

    @property
    def max_length(self) -> int:
        """Tokens of the longest request, its answer included."""
        return max(len(turn.token_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Cyclic:
    """Sizes of a cyclic workload, in tokens but for the first two."""

    name: str = "cyclic"
    num_sessions: int = 24
    num_turns: int = 6
    system: int = 1500
    user: int = 380
    answer: int = 280
    jitter: float = 0.2


@dataclass(frozen=True, slots=True)
class Agentic:
    """Bounds of the sample of sessions."""

    num_sessions: int = 32
    # Sessions of one tools + system prompt.
    max_family: int = 8
    max_requests: int = 24
    max_context: int = 100_000
    max_answer_tokens: int = 64
    # Over which the sessions start.
    span_s: float = 1800.0


class _Fresh:
    """Token ids that nobody has had before. Not of any vocabulary: nothing here reads them but the hash."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, num_tokens: int) -> Tokens:
        first, self._next = self._next, self._next + num_tokens
        return array("I", range(first, self._next))


class _Hasher:
    """Hashes of full blocks; those of the prefix that a session's last request had too are taken over."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Tokens, tuple[BlockHash, ...]]] = {}

    def hashes(self, session: int, token_ids: Tokens) -> tuple[BlockHash, ...]:
        last_ids, last_hashes = self._last.get(session, (array("I"), ()))
        num_known = min(num_common(last_ids, token_ids) // BLOCK_SIZE, len(last_hashes))
        chain = list(last_hashes[:num_known])
        for start in range(num_known * BLOCK_SIZE, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
            chain.append(hash_block(chain[-1] if chain else _ROOT, token_ids[start : start + BLOCK_SIZE]))
        self._last[session] = (token_ids, tuple(chain))
        return self._last[session][1]


def cyclic(sizes: Cyclic, seed: int) -> Workload:
    """Round-robin chats over one system prompt."""
    rng, fresh, hasher = random.Random(f"{seed}-{sizes.name}"), _Fresh(), _Hasher()

    def about(num_tokens: int) -> int:
        return round(num_tokens * rng.uniform(1 - sizes.jitter, 1 + sizes.jitter))

    system = fresh.take(sizes.system)
    chats = [system[:] for _ in range(sizes.num_sessions)]
    ends: list[list[int]] = [[sizes.system] for _ in chats]
    turns: list[Turn] = []
    for _ in range(sizes.num_turns):
        for session, chat in enumerate(chats):
            prompt = chat + fresh.take(about(sizes.user))
            whole = prompt + fresh.take(about(sizes.answer))
            hashes = hasher.hashes(session, whole)
            turns.append(Turn(session, whole, len(prompt), hashes, tuple(ends[session])))
            ends[session] += [len(prompt), len(whole)]
            chats[session] = whole
    num_live = sum(map(len, chats))
    num_once = num_live - sizes.system * (sizes.num_sessions - 1)
    return Workload(sizes.name, turns, {"live_tokens": num_live, "distinct_tokens": num_once})


def agentic(folder: Path, bounds: Agentic, seed: int) -> Workload:
    """A sample of agent sessions, interleaved. Raises OSError if the traces are not there."""
    rng = random.Random(f"{seed}-agentic")
    with gzip.open(folder / TRACE_FILE, "rt") as lines:
        fitting = [s for s in map(json.loads, lines) if _fits(s, bounds)]
    chosen = _sample(fitting, bounds, rng)
    timed: list[tuple[float, int, int, _Prompt]] = []
    content = _BlockContent()
    for session, trace in enumerate(chosen):
        start_s = rng.uniform(0, bounds.span_s)
        for index, prompt in enumerate(_prompts(session, trace, bounds, content)):
            timed.append((start_s + prompt.at_s, session, index, prompt))
    timed.sort(key=lambda item: item[:3])
    hasher = _Hasher()
    turns = []
    for _, session, _, prompt in timed:
        whole = prompt.token_ids + prompt.answer
        hashes = hasher.hashes(session, whole)
        turns.append(Turn(session, whole, len(prompt.token_ids), hashes, prompt.boundaries))
    return Workload("agentic", turns, {"sessions": len(chosen), "requests": len(turns)})


@dataclass(frozen=True, slots=True)
class _Prompt:
    at_s: float
    token_ids: Tokens
    answer: Tokens
    boundaries: tuple[int, ...]


class _BlockContent:
    """Tokens of a trace block: those of an id are the same wherever it comes in its scope."""

    def __init__(self) -> None:
        self._fresh = _Fresh()
        self._known: dict[tuple[Any, int], Tokens] = {}

    def of(self, scope: Any, block_id: int, num_tokens: int) -> Tokens:
        known = self._known.get((scope, block_id))
        if known is None:
            known = self._known[scope, block_id] = self._fresh.take(num_tokens)
        return known

    def fresh(self, num_tokens: int) -> Tokens:
        return self._fresh.take(num_tokens)


def _sample(traces: list[dict[str, Any]], bounds: Agentic, rng: random.Random) -> list[dict[str, Any]]:
    """By whole families of one tools + system prompt, so that as much is shared as among all sessions."""
    families: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for trace in traces:
        families.setdefault((trace["tool_tokens"], trace["system_tokens"]), []).append(trace)
    several = [family for family in families.values() if len(family) > 1]
    rng.shuffle(several)
    chosen = [trace for family in several for trace in family[: bounds.max_family]]
    return chosen[: bounds.num_sessions]


def _fits(trace: dict[str, Any], bounds: Agentic) -> bool:
    requests = trace["requests"]
    return len(requests) >= 4 and max(r["in"] for r in requests[: bounds.max_requests]) <= bounds.max_context


def _prompts(session: int, trace: dict[str, Any], bounds: Agentic, content: _BlockContent) -> Iterator[_Prompt]:
    size = trace["block_size"]
    head = (trace["tool_tokens"], trace["system_tokens"])
    requests = trace["requests"][: bounds.max_requests]
    prompts = _prompt_tokens(session, head, requests, size, content)
    last_of_lane: dict[str, int] = {}
    for index, (request, tokens) in enumerate(zip(requests, prompts, strict=True)):
        later = next((i for i in range(index + 1, len(requests)) if requests[i]["lane"] == request["lane"]), None)
        num_answer = max(1, min(request["out"], bounds.max_answer_tokens))
        answer: Tokens = array("I")
        if later is not None and num_common(tokens, prompts[later]) == len(tokens):
            answer = prompts[later][len(tokens) : len(tokens) + num_answer]
        ends = [head[0], sum(head)]
        earlier = last_of_lane.get(request["lane"])
        if earlier is not None:
            ends.append(num_common(prompts[earlier], tokens))
        last_of_lane[request["lane"]] = index
        boundaries = tuple(sorted({end for end in ends if 0 < end < len(tokens)}))
        yield _Prompt(request["t"], tokens, answer or content.fresh(num_answer), boundaries)


def _prompt_tokens(
    session: int, head: tuple[int, int], requests: list[dict[str, Any]], size: int, content: _BlockContent
) -> list[Tokens]:
    """Whole blocks of each prompt. Those of tools and system prompt are the same for all sessions with that head."""
    main = next((r for r in requests if r["lane"] == "0"), requests[0])
    shared = {block_id: i for i, block_id in enumerate(_unfold(main["h"])) if i < sum(head) // size}
    prompts: list[Tokens] = []
    for request in requests:
        tokens: Tokens = array("I")
        for block_id in _unfold(request["h"]):
            if block_id in shared:
                tokens += content.of(head, shared[block_id], size)
            else:
                tokens += content.of(session, block_id, size)
        prompts.append(tokens)
    return prompts


def _unfold(runs: Sequence[Sequence[int]]) -> Iterator[int]:
    for first, count in runs:
        yield from range(first, first + count)
