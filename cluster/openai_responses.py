"""OpenAI's response bodies: whole answers and the chunks of a stream, for both endpoints."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.choices import Indexed, usage_of
from cluster.errors import CideryError, InvalidRequest
from cluster.job import Completed, Event, Job, TextChunk
from cluster.scheduling.request import Finish, TokenLogprobs
from cluster.served_models import ServedModel
from cluster.tokenizer import Tokenizer

_FINISH = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORTED: "abort"}

DONE = b"data: [DONE]\n\n"


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def error_body(error: CideryError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {
        "error": {
            "message": str(error),
            "type": "invalid_request_error" if error.http_status < 500 else "server_error",
            "param": error.field if isinstance(error, InvalidRequest) else None,
            "code": error.reason.lower(),
        }
    }


def model_body(model: ServedModel) -> dict[str, Any]:
    """OpenAI's model object, with what only Cidery says."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "cidery",
        "parent": model.parent or None,
        "max_model_len": model.max_model_len,
        "num_macs": model.num_macs,
    }


def usage_body(completed: Completed) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": completed.num_prompt_tokens,
        "completion_tokens": completed.num_completion_tokens,
        "total_tokens": completed.num_prompt_tokens + completed.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": completed.num_cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": completed.num_accepted_tokens,
            "rejected_prediction_tokens": completed.num_drafted_tokens - completed.num_accepted_tokens,
        },
    }


def extension_body(completed: Completed) -> dict[str, Any]:
    """What only Cidery says: which Mac, how long, and the seed that repeats the answer."""
    return {
        "mac": completed.mac,
        "seed": completed.seed,
        "route_s": round(completed.route_s, 6),
        "queue_s": round(completed.queue_s, 6),
        "first_token_s": round(completed.first_token_s, 6),
        "total_s": round(completed.total_s, 6),
    }


def _seeds(completed: list[Completed]) -> dict[str, Any]:
    """Of each answer, where there are several."""
    return {"seeds": [each.seed for each in completed]} if len(completed) > 1 else {}


@dataclass(slots=True)
class Answer(ABC):
    """Builds the bodies of the answers to one request.

    `echoed` is the prompt as text, if it is part of the answer. `tells_prompt`: log-probabilities of the prompt have a
    field of their own.
    """

    job: Job
    tells_prompt: bool = False
    echoed: str | None = None
    created_s: int = field(default_factory=lambda: int(time.time()))

    object_name = ""
    chunk_object_name = ""

    @abstractmethod
    def _whole_choice(self, text: str, logprobs: dict[str, Any] | None, finish: str) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_choice(self, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, told: Sequence[TokenLogprobs], *, with_first: bool = False) -> dict[str, Any] | None:
        """`with_first`: the prompt's first token, which nothing predicts, comes before them."""

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """What a stream opens an answer with, before any text."""
        if self.echoed is None and not self.tells_prompt:
            return None
        logprobs = self._logprobs((), with_first=True) if self._echoes_logprobs else None
        choice = {"index": index} | self._chunk_choice(self.echoed or "", logprobs, None)
        return self._frame(self.chunk_object_name, [choice | self._prompt_logprobs((), with_first=True)])

    def whole(self, events: list[Indexed]) -> dict[str, Any]:
        """The body of answers that are not streamed."""
        by_index: dict[int, list[Event]] = {}
        for each in events:
            by_index.setdefault(each.index, []).append(each.event)
        choices, completed = [], []
        for index in sorted(by_index):
            choice, end = self._choice_of(by_index[index])
            choices.append({"index": index} | choice)
            completed.append(end)
        usage = usage_of(completed)
        return self._frame(self.object_name, choices) | {
            "usage": usage_body(usage),
            "cidery": extension_body(usage) | _seeds(completed),
        }

    def _choice_of(self, events: list[Event]) -> tuple[dict[str, Any], Completed]:
        chunks = [event for event in events if isinstance(event, TextChunk)]
        completed = events[-1]
        assert isinstance(completed, Completed)
        text = (self.echoed or "") + "".join(chunk.text for chunk in chunks)
        of_prompt = [each for chunk in chunks for each in chunk.prompt_logprobs]
        told = [each for chunk in chunks for each in chunk.logprobs]
        logprobs = self._logprobs(self._shown(of_prompt, told), with_first=self._echoes_logprobs)
        choice = self._whole_choice(text, logprobs, _FINISH[completed.finish])
        return choice | self._prompt_logprobs(of_prompt, with_first=True), completed

    def chunk(self, indexed: Indexed) -> dict[str, Any] | None:
        """One chunk of a stream; None when there is nothing to show yet."""
        index, event = {"index": indexed.index}, indexed.event
        if isinstance(event, Completed):
            choice = index | self._chunk_choice("", None, _FINISH[event.finish])
            return self._frame(self.chunk_object_name, [choice]) | {"cidery": extension_body(event)}
        shown = self._shown(event.prompt_logprobs, event.logprobs)
        if not event.text and not shown and not event.prompt_logprobs:
            return None
        choice = index | self._chunk_choice(event.text, self._logprobs(shown), None)
        return self._frame(self.chunk_object_name, [choice | self._prompt_logprobs(event.prompt_logprobs)])

    @property
    def _echoes_logprobs(self) -> bool:
        return self.echoed is not None and self.job.asked.num_prompt_logprobs is not None

    def _shown(self, of_prompt: Sequence[TokenLogprobs], told: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        return [*of_prompt, *told] if self.echoed is not None else [*told]

    def _prompt_logprobs(self, told: Sequence[TokenLogprobs], *, with_first: bool = False) -> dict[str, Any]:
        """vLLM's field: by token id, the prompt's own token and its likeliest rivals; none for the first token."""
        if not self.tells_prompt or not (told or with_first):
            return {}
        tokenizer = self.job.model.tokenizer
        entries: list[dict[str, Any] | None] = [None] if with_first else []
        for each in told:
            pairs = dict(each.top) | {each.token_id: each.logprob}
            entries.append(
                {
                    str(token_id): {"logprob": logprob, "decoded_token": tokenizer.token_text(token_id)}
                    for token_id, logprob in pairs.items()
                }
            )
        return {"prompt_logprobs": entries}

    def usage_chunk(self, completed: Completed) -> dict[str, Any]:
        """The extra chunk that `stream_options.include_usage` asks for."""
        return self._frame(self.chunk_object_name, []) | {"usage": usage_body(completed)}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.job.request_id,
            "object": kind,
            "created": self.created_s,
            "model": self.job.model.name,
            "choices": choices,
        }


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """The role."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._frame(self.chunk_object_name, [choice | self._prompt_logprobs((), with_first=True)])

    def _whole_choice(self, text: str, logprobs: dict[str, Any] | None, finish: str) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": finish,
        }

    def _chunk_choice(self, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
        delta = {"content": text} if finish is None else {}
        return {"delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, told: Sequence[TokenLogprobs], *, with_first: bool = False) -> dict[str, Any] | None:
        if not told:
            return None
        tokenizer = self.job.model.tokenizer
        content = [
            _token(tokenizer, each.token_id, each.logprob)
            | {"top_logprobs": [_token(tokenizer, token_id, logprob) for token_id, logprob in each.top]}
            for each in told
        ]
        return {"content": content, "refusal": None}


class TextAnswer(Answer):
    """/v1/completions."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def _whole_choice(self, text: str, logprobs: dict[str, Any] | None, finish: str) -> dict[str, Any]:
        return {"text": text, "logprobs": logprobs, "finish_reason": finish}

    def _chunk_choice(self, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
        return {"text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, told: Sequence[TokenLogprobs], *, with_first: bool = False) -> dict[str, Any] | None:
        if not told and not with_first:
            return None
        tokenizer = self.job.model.tokenizer
        first = [tokenizer.token_text(self.job.prompt.token_ids[0])] if with_first else []
        none = [None] if with_first else []
        return {
            "tokens": [*first, *(tokenizer.token_text(each.token_id) for each in told)],
            "token_logprobs": [*none, *(each.logprob for each in told)],
            "top_logprobs": [
                *none,
                *({tokenizer.token_text(token_id): logprob for token_id, logprob in each.top} for each in told),
            ],
        }


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": logprob,
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
