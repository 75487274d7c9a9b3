"""The load: closed-loop clients over plain asyncio sockets, and the prompts they send.

The clients share the cores with the servers, so they parse only what is measured: no HTTP library, one connection a
request, the same code for both servers.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, str]

SYSTEM_TOKENS = 1500
PROMPT_TOKENS = 200
QUESTION_TOKENS = 30


class RequestFailed(Exception):
    """A server refused a request or broke its stream."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    port: int
    model: str


@dataclass(slots=True)
class Answer:
    """What one request brought. Times in seconds; a gap lies between two content chunks that follow each other."""

    turn: int = 0
    text: str = ""
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chats:
    """Conversations over one system prompt: what the user says, turn by turn."""

    system: str
    opening: str
    conversations: list[list[str]]
    # Every answer of this model begins with a space, which mlx_lm.server cuts off. Fed back without it, an answer is
    # other tokens than those that were generated, and the peer would miss its cache.
    restores_space: bool


class Writer:
    """Makes prompts of a known number of tokens from words that are one token each."""

    def __init__(self, words: Sequence[str], seed: str, *, restores_space: bool) -> None:
        self._words = words
        self._random = random.Random(seed)
        self._restores_space = restores_space

    def text(self, num_tokens: int) -> str:
        """Random words; nothing that another text begins with."""
        return "".join(f" {word}" for word in self._random.choices(self._words, k=num_tokens))

    def prompts(self, num_prompts: int) -> list[str]:
        """Prompts that share nothing."""
        return [self.text(PROMPT_TOKENS) for _ in range(num_prompts)]

    def chats(self, num_conversations: int, num_turns: int) -> Chats:
        """Conversations that share the system prompt only."""
        turns = [[self.text(QUESTION_TOKENS) for _ in range(num_turns)] for _ in range(num_conversations)]
        return Chats(self.text(SYSTEM_TOKENS), self.text(QUESTION_TOKENS), turns, self._restores_space)


async def run_prompts(target: Target, prompts: Sequence[str], clients: int, max_tokens: int) -> list[Answer]:
    """Scenario (a): each client takes the next prompt when it has its answer."""
    answers: list[Answer | None] = [None] * len(prompts)
    left = iter(enumerate(prompts))

    async def client() -> None:
        for index, prompt in left:
            answers[index] = await ask(target, [{"role": "user", "content": prompt}], max_tokens)

    await _together(client() for _ in range(clients))
    return [answer for answer in answers if answer is not None]


async def open_chats(target: Target, chats: Chats, max_tokens: int) -> Answer:
    """Makes the system prompt known to the server; not part of the measured time."""
    return await ask(target, _messages(chats.system, chats.opening), max_tokens)


async def run_chats(target: Target, chats: Chats, clients: int, max_tokens: int) -> list[Answer]:
    """Scenario (b): each client holds a whole conversation, answers fed back, then takes the next one."""
    answers: list[Answer] = []
    left = iter(chats.conversations)

    async def client() -> None:
        for questions in left:
            messages = _messages(chats.system)
            for turn, question in enumerate(questions, 1):
                messages.append({"role": "user", "content": question})
                answer = await ask(target, messages, max_tokens)
                answer.turn = turn
                answers.append(answer)
                text = f" {answer.text.lstrip()}" if chats.restores_space else answer.text
                messages.append({"role": "assistant", "content": text})

    await _together(client() for _ in range(clients))
    return answers


async def ask(target: Target, messages: Sequence[Message], max_tokens: int) -> Answer:
    """One streamed, greedy chat completion. Raises RequestFailed."""
    body = {
        "model": target.model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer()
    last_s = started_s = time.perf_counter()
    async with aclosing(_events(target.port, json.dumps(body).encode())) as events:
        async for now_s, event in events:
            if "error" in event:
                raise RequestFailed(f"port {target.port}: {event['error']}")
            if usage := event.get("usage"):
                _count(answer, usage)
            if not (choices := event["choices"]) or not (text := choices[0]["delta"].get("content")):
                continue
            if answer.text:
                answer.gaps_s.append(now_s - last_s)
            else:
                answer.ttft_s = now_s - started_s
            answer.text += text
            last_s = now_s
    if not answer.num_output_tokens or not answer.text:
        raise RequestFailed(f"port {target.port}: the stream ended without an answer")
    return answer


def _count(answer: Answer, usage: dict[str, Any]) -> None:
    answer.num_prompt_tokens = usage["prompt_tokens"]
    answer.num_output_tokens = usage["completion_tokens"]
    answer.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def _messages(system: str, question: str | None = None) -> list[Message]:
    messages = [{"role": "system", "content": system}]
    return messages if question is None else [*messages, {"role": "user", "content": question}]


async def _together(clients: Iterator[Any]) -> None:
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client)


async def _events(port: int, body: bytes) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Server-sent events of one POST, each with the time its bytes were read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise RequestFailed(f"port {port}: {head.decode()}{(await reader.read()).decode(errors='replace')}")
        is_chunked = b"transfer-encoding: chunked" in head
        rest = b""
        while data := await (_read_chunk(reader) if is_chunked else reader.read(65536)):
            now_s = time.perf_counter()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield now_s, json.loads(line[6:])
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise RequestFailed(f"port {port}: {error!r}") from error
    finally:
        writer.close()


async def _read_chunk(reader: asyncio.StreamReader) -> bytes:
    size = int(await reader.readuntil(b"\r\n"), 16)
    return (await reader.readexactly(size + 2))[:size]
