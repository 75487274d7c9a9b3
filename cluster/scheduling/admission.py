"""Which requests a Mac takes at all: decided from the request and the limits alone, before anything is queued."""

from math import inf

from cluster.kv.layout import KVLayout
from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.errors import InvalidRequest, RequestTooLong
from cluster.scheduling.request import Request


def max_length(request: Request, config: SchedulerConfig) -> int:
    """Tokens, prompt included, after which the request ends by LENGTH; a prompt that is only read never gets there."""
    if request.reads_only:
        return request.num_prompt_tokens + 1
    return min(request.num_prompt_tokens + request.max_tokens, config.max_model_len)


def check_request(request: Request, config: SchedulerConfig, layout: KVLayout) -> None:
    """Refuse what could never run to its end, so that the oldest running request can always go on.

    Raises InvalidRequest for a request that contradicts itself, RequestTooLong for one that needs more than there is.
    """
    num_tokens, num_prompt_tokens = len(request.token_ids), request.num_prompt_tokens
    if not 1 <= num_prompt_tokens <= num_tokens:
        raise InvalidRequest(
            f"request {request.request_id}: num_prompt_tokens must be 1 to {num_tokens} (all its tokens), "
            f"got {num_prompt_tokens}"
        )
    if request.max_tokens < 0:
        raise InvalidRequest(f"request {request.request_id}: max_tokens must be at least 0, got {request.max_tokens}")
    _check_handling(request)
    num_full_blocks = num_tokens // layout.block_size
    if len(request.block_hashes) > num_full_blocks:
        raise InvalidRequest(
            f"request {request.request_id}: {num_tokens} tokens fill {num_full_blocks} blocks of {layout.block_size}, "
            f"got {len(request.block_hashes)} block hashes"
        )
    _check_reading(request)
    if request.reads_only:
        if num_prompt_tokens > config.max_model_len:
            raise RequestTooLong(
                f"request {request.request_id}: a prompt of {num_prompt_tokens} tokens is longer than max_model_len "
                f"{config.max_model_len}"
            )
    elif num_prompt_tokens > config.max_model_len - 1:
        raise RequestTooLong(
            f"request {request.request_id}: a prompt of {num_prompt_tokens} tokens leaves none to generate; at most "
            f"{config.max_model_len - 1} fit max_model_len {config.max_model_len}"
        )
    length = min(max_length(request, config), config.max_model_len)
    num_bytes = layout.bytes_for(length)
    if num_bytes > layout.usable_bytes:
        raise RequestTooLong(
            f"request {request.request_id}: {num_prompt_tokens} prompt tokens + max_tokens {request.max_tokens}, cut "
            f"at max_model_len {config.max_model_len}, = {length} tokens = {num_bytes} bytes of KV cache; "
            f"it has {layout.usable_bytes}"
        )


def _check_reading(request: Request) -> None:
    wanted = request.reading
    if wanted is None:
        return
    if not 1 <= wanted.first_scored <= request.num_prompt_tokens:
        raise InvalidRequest(
            f"request {request.request_id}: first_scored must be 1 to {request.num_prompt_tokens} (its prompt), "
            f"got {wanted.first_scored}"
        )
    if wanted.pooling is not None and not request.reads_only:
        raise InvalidRequest(
            f"request {request.request_id}: max_tokens must be 0 where the prompt is pooled, got {request.max_tokens}"
        )
    if wanted.pooling is not None and wanted.num_top_logprobs is not None:
        raise InvalidRequest(f"request {request.request_id}: a prompt is either pooled or scored, not both")


def _check_handling(request: Request) -> None:
    """Ranges within which shares and ranks stay finite; the gateway's are narrower."""
    if not 1e-6 <= request.tenant_weight <= 1e6:
        raise InvalidRequest(
            f"request {request.request_id}: tenant_weight must be from 1e-6 to 1e6, got {request.tenant_weight}"
        )
    if not -64 <= request.retention_priority <= 64:
        raise InvalidRequest(
            f"request {request.request_id}: retention_priority must be from -64 to 64, got {request.retention_priority}"
        )
    if not 0.0 <= request.pin_s < inf:
        raise InvalidRequest(f"request {request.request_id}: pin_s must be at least 0 and finite, got {request.pin_s}")
