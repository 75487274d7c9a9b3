from protos.cidery.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LayerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAYER_KIND_UNSPECIFIED: _ClassVar[LayerKind]
    LAYER_KIND_FULL_ATTENTION: _ClassVar[LayerKind]
    LAYER_KIND_SLIDING_WINDOW: _ClassVar[LayerKind]
    LAYER_KIND_CHUNKED_LOCAL: _ClassVar[LayerKind]
    LAYER_KIND_LATENT_ATTENTION: _ClassVar[LayerKind]
    LAYER_KIND_RECURRENT_STATE: _ClassVar[LayerKind]
LAYER_KIND_UNSPECIFIED: LayerKind
LAYER_KIND_FULL_ATTENTION: LayerKind
LAYER_KIND_SLIDING_WINDOW: LayerKind
LAYER_KIND_CHUNKED_LOCAL: LayerKind
LAYER_KIND_LATENT_ATTENTION: LayerKind
LAYER_KIND_RECURRENT_STATE: LayerKind

class StateTensor(_message.Message):
    __slots__ = ("shape", "dtype_bytes")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_BYTES_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype_bytes: int
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., dtype_bytes: _Optional[int] = ...) -> None: ...

class Layer(_message.Message):
    __slots__ = ("kind", "num_kv_heads", "head_dim", "dtype", "value_head_dim", "num_window_tokens", "states", "kv_bits", "kv_group_size")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    NUM_WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    KV_BITS_FIELD_NUMBER: _ClassVar[int]
    KV_GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    kind: LayerKind
    num_kv_heads: int
    head_dim: int
    dtype: str
    value_head_dim: int
    num_window_tokens: int
    states: _containers.RepeatedCompositeFieldContainer[StateTensor]
    kv_bits: int
    kv_group_size: int
    def __init__(self, kind: _Optional[_Union[LayerKind, str]] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., value_head_dim: _Optional[int] = ..., num_window_tokens: _Optional[int] = ..., states: _Optional[_Iterable[_Union[StateTensor, _Mapping]]] = ..., kv_bits: _Optional[int] = ..., kv_group_size: _Optional[int] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("layers", "vocab_size", "max_model_len", "eos_token_ids", "weights_bytes", "memory_limit_bytes", "device", "kernels", "pid", "is_gpu", "activation_bytes", "failed_kernels")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    IS_GPU_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILED_KERNELS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[Layer]
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    weights_bytes: int
    memory_limit_bytes: int
    device: str
    kernels: str
    pid: int
    is_gpu: bool
    activation_bytes: int
    failed_kernels: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, layers: _Optional[_Iterable[_Union[Layer, _Mapping]]] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., weights_bytes: _Optional[int] = ..., memory_limit_bytes: _Optional[int] = ..., device: _Optional[str] = ..., kernels: _Optional[str] = ..., pid: _Optional[int] = ..., is_gpu: _Optional[bool] = ..., activation_bytes: _Optional[int] = ..., failed_kernels: _Optional[_Iterable[str]] = ...) -> None: ...

class ManagerMessage(_message.Message):
    __slots__ = ("configure", "plan", "load_adapter", "unload_adapter")
    CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    configure: Configure
    plan: StepPlan
    load_adapter: LoadAdapter
    unload_adapter: UnloadAdapter
    def __init__(self, configure: _Optional[_Union[Configure, _Mapping]] = ..., plan: _Optional[_Union[StepPlan, _Mapping]] = ..., load_adapter: _Optional[_Union[LoadAdapter, _Mapping]] = ..., unload_adapter: _Optional[_Union[UnloadAdapter, _Mapping]] = ...) -> None: ...

class LoadAdapter(_message.Message):
    __slots__ = ("digest", "folder")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    digest: str
    folder: str
    def __init__(self, digest: _Optional[str] = ..., folder: _Optional[str] = ...) -> None: ...

class UnloadAdapter(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class AdapterLoaded(_message.Message):
    __slots__ = ("digest", "num_bytes", "refusal")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    digest: str
    num_bytes: int
    refusal: str
    def __init__(self, digest: _Optional[str] = ..., num_bytes: _Optional[int] = ..., refusal: _Optional[str] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("pool", "layers")
    POOL_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    pool: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pool: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ...) -> None: ...

class Configure(_message.Message):
    __slots__ = ("block_size", "num_blocks", "root_hash", "groups")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ROOT_HASH_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    num_blocks: _containers.RepeatedScalarFieldContainer[int]
    root_hash: bytes
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    def __init__(self, block_size: _Optional[int] = ..., num_blocks: _Optional[_Iterable[int]] = ..., root_hash: _Optional[bytes] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ...) -> None: ...

class GroupBlocks(_message.Message):
    __slots__ = ("group", "block_ids")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    group: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class NewSequence(_message.Message):
    __slots__ = ("seq_id", "token_ids", "block_hashes", "sampling", "stop_token_ids", "block_tables", "num_prompt_tokens", "cache_salt", "first_scored", "pooling", "reads_only", "adapter")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    FIRST_SCORED_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    READS_ONLY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_hashes: bytes
    sampling: _sampling_pb2.SamplingParams
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_tables: _containers.RepeatedCompositeFieldContainer[GroupBlocks]
    num_prompt_tokens: int
    cache_salt: str
    first_scored: int
    pooling: _sampling_pb2.Pooling
    reads_only: bool
    adapter: str
    def __init__(self, seq_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_hashes: _Optional[bytes] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., block_tables: _Optional[_Iterable[_Union[GroupBlocks, _Mapping]]] = ..., num_prompt_tokens: _Optional[int] = ..., cache_salt: _Optional[str] = ..., first_scored: _Optional[int] = ..., pooling: _Optional[_Union[_sampling_pb2.Pooling, str]] = ..., reads_only: _Optional[bool] = ..., adapter: _Optional[str] = ...) -> None: ...

class Slice(_message.Message):
    __slots__ = ("seq_id", "start", "num_tokens", "samples", "new_blocks", "max_drafts")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    start: int
    num_tokens: int
    samples: bool
    new_blocks: _containers.RepeatedCompositeFieldContainer[GroupBlocks]
    max_drafts: int
    def __init__(self, seq_id: _Optional[int] = ..., start: _Optional[int] = ..., num_tokens: _Optional[int] = ..., samples: _Optional[bool] = ..., new_blocks: _Optional[_Iterable[_Union[GroupBlocks, _Mapping]]] = ..., max_drafts: _Optional[int] = ...) -> None: ...

class TableEdit(_message.Message):
    __slots__ = ("seq_id", "group", "index", "block_id")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    group: int
    index: int
    block_id: int
    def __init__(self, seq_id: _Optional[int] = ..., group: _Optional[int] = ..., index: _Optional[int] = ..., block_id: _Optional[int] = ...) -> None: ...

class PoolResize(_message.Message):
    __slots__ = ("pool", "num_blocks", "moves")
    class Move(_message.Message):
        __slots__ = ("source", "target")
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        TARGET_FIELD_NUMBER: _ClassVar[int]
        source: int
        target: int
        def __init__(self, source: _Optional[int] = ..., target: _Optional[int] = ...) -> None: ...
    POOL_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    pool: int
    num_blocks: int
    moves: _containers.RepeatedCompositeFieldContainer[PoolResize.Move]
    def __init__(self, pool: _Optional[int] = ..., num_blocks: _Optional[int] = ..., moves: _Optional[_Iterable[_Union[PoolResize.Move, _Mapping]]] = ...) -> None: ...

class BlockCopy(_message.Message):
    __slots__ = ("group", "source", "target")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    group: int
    source: int
    target: int
    def __init__(self, group: _Optional[int] = ..., source: _Optional[int] = ..., target: _Optional[int] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("step_id", "released_seq_ids", "new_sequences", "copies", "zeroes", "slices", "edits", "resizes")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASED_SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    NEW_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    ZEROES_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    EDITS_FIELD_NUMBER: _ClassVar[int]
    RESIZES_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    released_seq_ids: _containers.RepeatedScalarFieldContainer[int]
    new_sequences: _containers.RepeatedCompositeFieldContainer[NewSequence]
    copies: _containers.RepeatedCompositeFieldContainer[BlockCopy]
    zeroes: _containers.RepeatedCompositeFieldContainer[GroupBlocks]
    slices: _containers.RepeatedCompositeFieldContainer[Slice]
    edits: _containers.RepeatedCompositeFieldContainer[TableEdit]
    resizes: _containers.RepeatedCompositeFieldContainer[PoolResize]
    def __init__(self, step_id: _Optional[int] = ..., released_seq_ids: _Optional[_Iterable[int]] = ..., new_sequences: _Optional[_Iterable[_Union[NewSequence, _Mapping]]] = ..., copies: _Optional[_Iterable[_Union[BlockCopy, _Mapping]]] = ..., zeroes: _Optional[_Iterable[_Union[GroupBlocks, _Mapping]]] = ..., slices: _Optional[_Iterable[_Union[Slice, _Mapping]]] = ..., edits: _Optional[_Iterable[_Union[TableEdit, _Mapping]]] = ..., resizes: _Optional[_Iterable[_Union[PoolResize, _Mapping]]] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("description", "configured", "result", "failure", "adapter_loaded")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOADED_FIELD_NUMBER: _ClassVar[int]
    description: Description
    configured: Configured
    result: StepResult
    failure: Failure
    adapter_loaded: AdapterLoaded
    def __init__(self, description: _Optional[_Union[Description, _Mapping]] = ..., configured: _Optional[_Union[Configured, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., adapter_loaded: _Optional[_Union[AdapterLoaded, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("is_protocol_error", "message")
    IS_PROTOCOL_ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    is_protocol_error: bool
    message: str
    def __init__(self, is_protocol_error: _Optional[bool] = ..., message: _Optional[str] = ...) -> None: ...

class Configured(_message.Message):
    __slots__ = ("kv_bytes",)
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    kv_bytes: int
    def __init__(self, kv_bytes: _Optional[int] = ...) -> None: ...

class Sampled(_message.Message):
    __slots__ = ("seq_id", "token_id", "logprobs", "stopped", "failure", "is_read", "embedding")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    IS_READ_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    token_id: int
    logprobs: _sampling_pb2.TokenLogprobs
    stopped: bool
    failure: str
    is_read: bool
    embedding: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, seq_id: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_sampling_pb2.TokenLogprobs, _Mapping]] = ..., stopped: _Optional[bool] = ..., failure: _Optional[str] = ..., is_read: _Optional[bool] = ..., embedding: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("seq_id", "start", "logprobs", "num_top", "top_token_ids", "top_logprobs")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    start: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    num_top: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, seq_id: _Optional[int] = ..., start: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., num_top: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class FilledBlock(_message.Message):
    __slots__ = ("seq_id", "block_index", "block_hash")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    block_index: int
    block_hash: bytes
    def __init__(self, seq_id: _Optional[int] = ..., block_index: _Optional[int] = ..., block_hash: _Optional[bytes] = ...) -> None: ...

class Speculated(_message.Message):
    __slots__ = ("seq_id", "num_drafts", "num_wanted")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_WANTED_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    num_drafts: int
    num_wanted: int
    def __init__(self, seq_id: _Optional[int] = ..., num_drafts: _Optional[int] = ..., num_wanted: _Optional[int] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("idle_s", "run_s")
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    RUN_S_FIELD_NUMBER: _ClassVar[int]
    idle_s: float
    run_s: float
    def __init__(self, idle_s: _Optional[float] = ..., run_s: _Optional[float] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("active_bytes", "peak_bytes", "cache_bytes")
    ACTIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    active_bytes: int
    peak_bytes: int
    cache_bytes: int
    def __init__(self, active_bytes: _Optional[int] = ..., peak_bytes: _Optional[int] = ..., cache_bytes: _Optional[int] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step_id", "sampled", "filled_blocks", "skipped_seq_ids", "timings", "memory", "speculated", "prompt_logprobs")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    FILLED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    SPECULATED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    sampled: _containers.RepeatedCompositeFieldContainer[Sampled]
    filled_blocks: _containers.RepeatedCompositeFieldContainer[FilledBlock]
    skipped_seq_ids: _containers.RepeatedScalarFieldContainer[int]
    timings: StepTimings
    memory: Memory
    speculated: _containers.RepeatedCompositeFieldContainer[Speculated]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    def __init__(self, step_id: _Optional[int] = ..., sampled: _Optional[_Iterable[_Union[Sampled, _Mapping]]] = ..., filled_blocks: _Optional[_Iterable[_Union[FilledBlock, _Mapping]]] = ..., skipped_seq_ids: _Optional[_Iterable[int]] = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ..., memory: _Optional[_Union[Memory, _Mapping]] = ..., speculated: _Optional[_Iterable[_Union[Speculated, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ...) -> None: ...
