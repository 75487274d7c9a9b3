"""A request as the scheduler sees it, and what it reports of one."""

from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto

from cluster.kv.hashing import BlockHash


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What is done to a row's logits before its token is drawn; as it stands here, nothing.

    `banned_sequences` are those of one token too; `grammar` is in llguidance's form, empty for none.
    """

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""


class Speculation(StrEnum):
    """How tokens are guessed, to be verified several in a step; DEFAULT: as the Mac was started."""

    DEFAULT = auto()
    OFF = auto()
    AUTO = auto()
    NGRAM = auto()
    DRAFT = auto()


NO_RULES = LogitRules()
XTC_THRESHOLD = 0.1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved: no field is left to a default further down. Ranges are those of protos/cidery/v1/sampling.proto."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    # None: no log-probabilities; k: those of the drawn token and of the k likeliest.
    num_top_logprobs: int | None = None
    xtc_probability: float = 0.0
    xtc_threshold: float = XTC_THRESHOLD
    rules: LogitRules = NO_RULES
    speculation: Speculation = Speculation.DEFAULT


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Under the model's own distribution; `top` likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Pooling(Enum):
    """Which outputs of the last layer stand for a whole prompt; see protos/cidery/v1/sampling.proto."""

    LAST = auto()
    MEAN = auto()
    CLS = auto()


@dataclass(frozen=True, slots=True)
class Reading:
    """What is wanted of a prompt itself: log-probabilities of its tokens, or one vector for all of it."""

    # None: no log-probabilities; k: those of each token from `first_scored` on, and of the k likeliest there.
    num_top_logprobs: int | None = None
    # At least 1, because nothing predicts the first token; more once some have been told already.
    first_scored: int = 1
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it arrives at a Mac.

    `token_ids` is the prompt followed by what another Mac generated before it was lost; `block_hashes` are those of its
    full blocks. At most `max_tokens` tokens are generated after the first `num_prompt_tokens`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    block_hashes: tuple[BlockHash, ...]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    # Token offsets where messages end: prefixes that later requests are likely to share.
    boundaries: tuple[int, ...] = ()
    # Who is served first, and in which proportion, while requests wait.
    tenant: str = ""
    tenant_weight: float = 1.0
    priority: int = 0
    # How much longer than others its prefix is worth keeping (a step doubles), and for how long in any case.
    retention_priority: int = 0
    pin_s: float = 0.0
    # Is part of block_hashes already; for the blocks that the Mac fills itself.
    cache_salt: str = ""
    # Digest of the adapter, empty for none; part of block_hashes too.
    adapter: str = ""
    # With max_tokens 0 the prompt is run for this alone.
    reading: Reading | None = None

    @property
    def reads_only(self) -> bool:
        """Whether no token is drawn, and yet the prompt is run."""
        return self.reading is not None and self.max_tokens == 0


class Finish(Enum):
    """Why a request ended."""

    STOP = auto()
    LENGTH = auto()
    ABORTED = auto()


@dataclass(frozen=True, slots=True)
class Update:
    """What one step did for one request."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish: Finish | None
    # Tokens of the prompt found in the cache when the request was first admitted.
    num_cached_tokens: int
    # From arrival to the first plan that ran it.
    queue_s: float
    # Guessed tokens that the step ran, and those of `token_ids` that were among them.
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    # Not empty: why it can't go on; nothing else of it will come.
    failure: str = ""
    # Of the next tokens of the prompt; those of a step come before its token.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # What was pooled of the prompt, with the last update.
    embedding: tuple[float, ...] = ()


def one_by_one(update: Update) -> list[Update]:
    """The same told token by token: all but the last of several were guessed and came true."""
    last = len(update.token_ids) - 1
    return [
        replace(
            update,
            token_ids=(token_id,),
            logprobs=update.logprobs[place : place + 1],
            finish=update.finish if place == last else None,
            num_drafted_tokens=update.num_drafted_tokens if place == 0 else 0,
            num_accepted_tokens=int(place < last),
        )
        for place, token_id in enumerate(update.token_ids)
    ] or [update]
