"""The one module that knows both the pure core's dataclasses and the messages of the node and worker protocols."""

from collections.abc import Sequence

from cluster.errors import BY_REASON, CideryError, InvalidRequest, Overloaded, RequestTooLong
from cluster.kv.hashing import BlockHash, join_hashes, split_hashes
from cluster.kv.layout import KVLayout
from cluster.kv.memory import PoolResize
from cluster.kv.sequence import GroupBlocks
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
from cluster.scheduling.request import (
    NO_RULES,
    XTC_THRESHOLD,
    Finish,
    LogitRules,
    Pooling,
    Reading,
    Request,
    SamplingParams,
    Speculation,
    TokenLogprobs,
    Update,
)
from protos.cidery.node.v1 import node_pb2
from protos.cidery.v1 import handling_pb2, sampling_pb2
from protos.cidery.worker.v1 import worker_pb2

FINISH_TO_PROTO = {
    None: sampling_pb2.FINISH_REASON_UNSPECIFIED,
    Finish.STOP: sampling_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
    Finish.ABORTED: sampling_pb2.FINISH_REASON_ABORTED,
}
FINISH_FROM_PROTO = {value: key for key, value in FINISH_TO_PROTO.items()}
SPECULATION_TO_PROTO = {
    Speculation.DEFAULT: sampling_pb2.SPECULATION_UNSPECIFIED,
    Speculation.OFF: sampling_pb2.SPECULATION_OFF,
    Speculation.AUTO: sampling_pb2.SPECULATION_AUTO,
    Speculation.NGRAM: sampling_pb2.SPECULATION_NGRAM,
    Speculation.DRAFT: sampling_pb2.SPECULATION_DRAFT,
}
SPECULATION_FROM_PROTO = {value: key for key, value in SPECULATION_TO_PROTO.items()}
POOLING_TO_PROTO = {
    None: sampling_pb2.POOLING_UNSPECIFIED,
    Pooling.LAST: sampling_pb2.POOLING_LAST,
    Pooling.MEAN: sampling_pb2.POOLING_MEAN,
    Pooling.CLS: sampling_pb2.POOLING_CLS,
}
POOLING_FROM_PROTO = {value: key for key, value in POOLING_TO_PROTO.items()}


def sampling_to_proto(params: SamplingParams, reading: Reading | None = None) -> sampling_pb2.SamplingParams:
    """Every field present that the model has a default for, as node and worker expect it."""
    message = sampling_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        num_top_logprobs=params.num_top_logprobs,
        num_prompt_logprobs=reading.num_top_logprobs if reading is not None else None,
    )
    if (params.xtc_probability, params.xtc_threshold) != (0.0, XTC_THRESHOLD):
        message.xtc_probability, message.xtc_threshold = params.xtc_probability, params.xtc_threshold
    rules = params.rules
    if rules != NO_RULES:
        message.frequency_penalty, message.presence_penalty = rules.frequency_penalty, rules.presence_penalty
        message.repetition_penalty = rules.repetition_penalty
        message.logit_bias.update(rules.logit_bias)
        message.min_tokens = rules.min_tokens
        message.banned_sequences.extend(sampling_pb2.TokenSequence(token_ids=ids) for ids in rules.banned_sequences)
        message.compiled_grammar = rules.grammar
    message.speculation = SPECULATION_TO_PROTO[params.speculation]
    return message


def sampling_from_proto(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Of a resolved message; nothing is defaulted here."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        num_top_logprobs=message.num_top_logprobs if message.HasField("num_top_logprobs") else None,
        xtc_probability=message.xtc_probability,
        xtc_threshold=message.xtc_threshold if message.HasField("xtc_threshold") else XTC_THRESHOLD,
        rules=_rules_from_proto(message) if message.HasField("repetition_penalty") else NO_RULES,
        speculation=SPECULATION_FROM_PROTO[message.speculation],
    )


def _rules_from_proto(message: sampling_pb2.SamplingParams) -> LogitRules:
    return LogitRules(
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        min_tokens=message.min_tokens,
        banned_sequences=tuple(tuple(sequence.token_ids) for sequence in message.banned_sequences),
        grammar=message.compiled_grammar,
    )


def logprobs_to_proto(logprobs: TokenLogprobs) -> sampling_pb2.TokenLogprobs:
    """Ids and numbers only; the gateway adds the text."""
    return sampling_pb2.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        top=[sampling_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in logprobs.top],
    )


def logprobs_from_proto(message: sampling_pb2.TokenLogprobs) -> TokenLogprobs:
    """Inverse of `logprobs_to_proto`."""
    return TokenLogprobs(message.token_id, message.logprob, tuple((top.token_id, top.logprob) for top in message.top))


def request_to_open(request: Request, root_hash: BlockHash, *, ignore_eos: bool) -> node_pb2.ConnectRequest:
    """The gateway's message that starts a request on a Mac; which tokens end an answer is the Mac's to know."""
    sampling = sampling_to_proto(request.sampling, request.reading)
    sampling.max_tokens = request.max_tokens
    sampling.ignore_eos = ignore_eos
    sampling.stop_token_ids.extend(request.stop_token_ids)
    return node_pb2.ConnectRequest(
        open=node_pb2.Open(
            request_id=request.request_id,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            block_hashes=join_hashes(request.block_hashes),
            sampling=sampling,
            boundaries=request.boundaries,
            root_hash=root_hash,
            handling=handling_pb2.Handling(
                tenant=request.tenant,
                priority=request.priority,
                retention_priority=request.retention_priority,
                pin_s=request.pin_s,
                cache_salt=request.cache_salt,
            ),
            tenant_weight=request.tenant_weight,
            adapter=request.adapter,
            first_scored=request.reading.first_scored if request.reading is not None else 0,
            pooling=_pooling(request.reading),
        )
    )


def request_from_open(message: node_pb2.Open, eos_token_ids: Sequence[int]) -> Request:
    """Inverse of `request_to_open`; the model's own end tokens join the client's unless it asked to ignore them."""
    stops = tuple(message.sampling.stop_token_ids)
    if not message.sampling.ignore_eos:
        stops += tuple(eos_token_ids)
    return Request(
        request_id=message.request_id,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        block_hashes=tuple(split_hashes(message.block_hashes)),
        max_tokens=message.sampling.max_tokens,
        sampling=sampling_from_proto(message.sampling),
        stop_token_ids=stops,
        boundaries=tuple(message.boundaries),
        tenant=message.handling.tenant,
        tenant_weight=message.tenant_weight,
        priority=message.handling.priority,
        retention_priority=message.handling.retention_priority,
        pin_s=message.handling.pin_s,
        cache_salt=message.handling.cache_salt,
        adapter=message.adapter,
        reading=_reading_from_proto(message),
    )


def _pooling(reading: Reading | None) -> sampling_pb2.Pooling:
    return POOLING_TO_PROTO[reading.pooling if reading is not None else None]


def _reading_from_proto(message: node_pb2.Open) -> Reading | None:
    has_logprobs = message.sampling.HasField("num_prompt_logprobs")
    if not has_logprobs and not message.pooling:
        return None
    return Reading(
        num_top_logprobs=message.sampling.num_prompt_logprobs if has_logprobs else None,
        first_scored=message.first_scored,
        pooling=POOLING_FROM_PROTO[message.pooling],
    )


def update_to_proto(update: Update) -> node_pb2.Update:
    """What the Mac reports of one request after one step."""
    if update.failure:
        return failure_to_proto(update.request_id, InvalidRequest("grammar", update.failure))
    return node_pb2.Update(
        request_id=update.request_id,
        token_ids=update.token_ids,
        logprobs=[logprobs_to_proto(logprobs) for logprobs in update.logprobs],
        finish_reason=FINISH_TO_PROTO[update.finish],
        num_cached_tokens=update.num_cached_tokens,
        queue_s=update.queue_s,
        num_drafted_tokens=update.num_drafted_tokens,
        num_accepted_tokens=update.num_accepted_tokens,
        prompt_logprobs=[logprobs_to_proto(logprobs) for logprobs in update.prompt_logprobs],
        embedding=update.embedding,
    )


def update_from_proto(message: node_pb2.Update) -> Update:
    """Inverse of `update_to_proto`."""
    return Update(
        request_id=message.request_id,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(logprobs_from_proto(logprobs) for logprobs in message.logprobs),
        finish=FINISH_FROM_PROTO[message.finish_reason],
        num_cached_tokens=message.num_cached_tokens,
        queue_s=message.queue_s,
        num_drafted_tokens=message.num_drafted_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        prompt_logprobs=tuple(logprobs_from_proto(logprobs) for logprobs in message.prompt_logprobs),
        embedding=tuple(message.embedding),
    )


def failure_to_proto(request_id: str, error: CideryError) -> node_pb2.Update:
    """A request that could not be run, by the error's name."""
    message = error.detail if isinstance(error, InvalidRequest) else str(error)
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
    field = error.field if isinstance(error, InvalidRequest) else ""
    failure = node_pb2.Failure(reason=error.reason, message=message, retry_after_s=retry_after_s, field=field)
    return node_pb2.Update(request_id=request_id, failure=failure)


def failure_from_proto(message: node_pb2.Failure) -> CideryError:
    """Inverse of `failure_to_proto`; an unknown reason becomes an internal error that quotes it."""
    kind = BY_REASON.get(message.reason)
    if kind is RequestTooLong:
        return RequestTooLong(message.message)
    if kind is InvalidRequest:
        return InvalidRequest(message.field, message.message)
    if kind is Overloaded:
        return Overloaded(message.message, message.retry_after_s)
    if kind is None:
        return CideryError(f"{message.reason}: {message.message}")
    return kind(message.message)


def plan_to_proto(plan: StepPlan) -> worker_pb2.ManagerMessage:
    """One step for the worker."""
    return worker_pb2.ManagerMessage(
        plan=worker_pb2.StepPlan(
            step_id=plan.step_id,
            released_seq_ids=plan.released_seq_ids,
            edits=[
                worker_pb2.TableEdit(seq_id=e.seq_id, group=e.group, index=e.index, block_id=e.block_id)
                for e in plan.edits
            ],
            new_sequences=[_new_sequence(new) for new in plan.new_sequences],
            copies=[worker_pb2.BlockCopy(group=c.group, source=c.source, target=c.target) for c in plan.copies],
            zeroes=_groups(plan.zeroes or {}),
            slices=[_slice(part) for part in plan.slices],
            resizes=[_resize(resize) for resize in plan.resizes],
        )
    )


def layout_to_proto(layout: KVLayout, root_hash: BlockHash) -> worker_pb2.Configure:
    """What the worker makes its pools from."""
    return worker_pb2.Configure(
        block_size=layout.block_size,
        num_blocks=[pool.num_blocks for pool in layout.pools],
        root_hash=root_hash,
        groups=[worker_pb2.Group(pool=group.pool_id, layers=group.layer_indices) for group in layout.groups],
    )


def _resize(resize: PoolResize) -> worker_pb2.PoolResize:
    return worker_pb2.PoolResize(
        pool=resize.pool_id,
        num_blocks=resize.num_blocks,
        moves=[worker_pb2.PoolResize.Move(source=source, target=target) for source, target in resize.moves],
    )


def _new_sequence(new: NewSequence) -> worker_pb2.NewSequence:
    return worker_pb2.NewSequence(
        seq_id=new.seq_id,
        token_ids=new.token_ids,
        block_hashes=new.block_hashes,
        sampling=sampling_to_proto(new.sampling, new.reading),
        stop_token_ids=new.stop_token_ids,
        block_tables=_groups(new.block_tables),
        num_prompt_tokens=new.num_prompt_tokens,
        cache_salt=new.cache_salt,
        adapter=new.adapter,
        first_scored=new.reading.first_scored if new.reading is not None else 0,
        pooling=_pooling(new.reading),
        reads_only=new.reads_only,
    )


def _slice(part: Slice) -> worker_pb2.Slice:
    return worker_pb2.Slice(
        seq_id=part.seq_id,
        start=part.start,
        num_tokens=part.num_tokens,
        samples=part.samples,
        new_blocks=_groups(part.new_blocks),
        max_drafts=part.max_drafts,
    )


def _groups(blocks: GroupBlocks) -> list[worker_pb2.GroupBlocks]:
    return [worker_pb2.GroupBlocks(group=group, block_ids=ids) for group, ids in blocks.items()]


def result_from_proto(message: worker_pb2.StepResult) -> StepResult:
    """What the worker did."""
    return StepResult(
        step_id=message.step_id,
        sampled=tuple(
            Sampled(
                row.seq_id,
                row.token_id,
                logprobs_from_proto(row.logprobs) if row.HasField("logprobs") else None,
                row.stopped,
                row.failure,
                row.is_read,
                tuple(row.embedding),
            )
            for row in message.sampled
        ),
        filled_blocks=tuple(
            FilledBlock(block.seq_id, block.block_index, BlockHash(block.block_hash)) for block in message.filled_blocks
        ),
        skipped_seq_ids=tuple(message.skipped_seq_ids),
        speculated=tuple(Speculated(row.seq_id, row.num_drafts, row.num_wanted) for row in message.speculated),
        run_s=message.timings.run_s,
        idle_s=message.timings.idle_s,
        prompt_logprobs=tuple(_prompt_logprobs(scores) for scores in message.prompt_logprobs),
    )


def _prompt_logprobs(message: worker_pb2.PromptLogprobs) -> PromptLogprobs:
    num, num_top = len(message.logprobs), message.num_top
    pairs = tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    top = tuple(pairs[at * num_top : (at + 1) * num_top] for at in range(num))
    return PromptLogprobs(message.seq_id, message.start, tuple(message.logprobs), top)
