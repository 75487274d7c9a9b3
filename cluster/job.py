"""A request as a face (gRPC or HTTP) hands it over, and what it gets back."""

from dataclasses import dataclass

from cluster.handling import Handling
from cluster.sampling import SamplingRequest
from cluster.scheduling.request import Finish, Pooling, TokenLogprobs
from cluster.served_models import ServedModel
from cluster.tokenizer import Prompt


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked."""

    request_id: str
    model: ServedModel
    prompt: Prompt
    asked: SamplingRequest
    arrived_s: float
    handling: Handling
    # When the client gives up, by the monotonic clock; None: never.
    deadline_s: float | None = None
    # Then nothing is drawn, and Completed has the vector.
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class TextChunk:
    """What became certain since the last chunk; `text` lags behind `token_ids` while it may belong to a stop string."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    # Of the next tokens of the prompt, from its second on; they come before any text.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Completed:
    """The end of an answer. Times in seconds since arrival at the gateway, `queue_s` at the Mac."""

    finish: Finish
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    route_s: float
    queue_s: float
    first_token_s: float
    total_s: float
    mac: str
    seed: int
    stop: str | None
    embedding: tuple[float, ...] = ()
    # Tokens guessed on Macs, and those of the answer that were guessed.
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0


Event = TextChunk | Completed
