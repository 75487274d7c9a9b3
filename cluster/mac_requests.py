"""A request as it comes to a Mac, held against the model that the Mac really runs."""

from dataclasses import replace

from cluster import wire
from cluster.config import SpeculationConfig
from cluster.errors import InvalidRequest
from cluster.sampling import with_speculation
from cluster.scheduling.request import Request
from protos.cidery.node.v1 import node_pb2
from protos.cidery.worker.v1 import worker_pb2


def request_of(message: node_pb2.Open, described: worker_pb2.Description, speculation: SpeculationConfig) -> Request:
    """For the scheduler. Raises InvalidRequest for tokens that the model doesn't have, or a grammar it can't end."""
    request = wire.request_from_open(message, described.eos_token_ids)
    request = replace(request, sampling=with_speculation(request.sampling, speculation))
    rules = request.sampling.rules
    if rules.grammar and not described.eos_token_ids:
        raise InvalidRequest("grammar", "the model has no end token, which is what follows a complete answer")
    named = {
        "prompt": request.token_ids,
        "logit_bias": [token for token, _ in rules.logit_bias],
        "banned tokens": [token for sequence in rules.banned_sequences for token in sequence],
    }
    for field, token_ids in named.items():
        largest = max(token_ids, default=0)
        if largest >= described.vocab_size:
            raise InvalidRequest(field, f"token ids must be below {described.vocab_size}, got {largest}")
    return request
