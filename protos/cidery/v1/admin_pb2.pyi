from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MacState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MAC_STATE_UNSPECIFIED: _ClassVar[MacState]
    MAC_STATE_STARTING: _ClassVar[MacState]
    MAC_STATE_READY: _ClassVar[MacState]
    MAC_STATE_DRAINING: _ClassVar[MacState]
    MAC_STATE_LOST: _ClassVar[MacState]
    MAC_STATE_CORDONED: _ClassVar[MacState]

class AdapterState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADAPTER_STATE_UNSPECIFIED: _ClassVar[AdapterState]
    ADAPTER_STATE_LOADING: _ClassVar[AdapterState]
    ADAPTER_STATE_READY: _ClassVar[AdapterState]
    ADAPTER_STATE_FAILED: _ClassVar[AdapterState]
    ADAPTER_STATE_LEAVING: _ClassVar[AdapterState]
MAC_STATE_UNSPECIFIED: MacState
MAC_STATE_STARTING: MacState
MAC_STATE_READY: MacState
MAC_STATE_DRAINING: MacState
MAC_STATE_LOST: MacState
MAC_STATE_CORDONED: MacState
ADAPTER_STATE_UNSPECIFIED: AdapterState
ADAPTER_STATE_LOADING: AdapterState
ADAPTER_STATE_READY: AdapterState
ADAPTER_STATE_FAILED: AdapterState
ADAPTER_STATE_LEAVING: AdapterState

class Load(_message.Message):
    __slots__ = ("num_requests", "num_prefill_tokens", "num_decoding")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODING_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    num_prefill_tokens: int
    num_decoding: int
    def __init__(self, num_requests: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., num_decoding: _Optional[int] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("num_total", "num_used", "num_cached", "num_free", "block_bytes")
    NUM_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_total: int
    num_used: int
    num_cached: int
    num_free: int
    block_bytes: int
    def __init__(self, num_total: _Optional[int] = ..., num_used: _Optional[int] = ..., num_cached: _Optional[int] = ..., num_free: _Optional[int] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class Scheduling(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_preemptions", "num_steps", "num_prompt_tokens", "num_cached_tokens", "num_generated_tokens", "num_worker_restarts", "num_drafted_tokens", "num_accepted_tokens")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKER_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_worker_restarts: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ..., num_worker_restarts: _Optional[int] = ..., num_drafted_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ...) -> None: ...

class Drift(_message.Message):
    __slots__ = ("num_requests", "num_predicted_tokens", "num_actual_tokens", "num_error_tokens", "is_alarming")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREDICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACTUAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ERROR_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_ALARMING_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    num_predicted_tokens: int
    num_actual_tokens: int
    num_error_tokens: int
    is_alarming: bool
    def __init__(self, num_requests: _Optional[int] = ..., num_predicted_tokens: _Optional[int] = ..., num_actual_tokens: _Optional[int] = ..., num_error_tokens: _Optional[int] = ..., is_alarming: _Optional[bool] = ...) -> None: ...

class KVGroup(_message.Message):
    __slots__ = ("kind", "num_layers", "page_bytes", "num_queried_tokens", "num_hit_tokens", "num_limited", "num_evicted_left_behind", "num_evicted_ranked", "num_evicted_orphaned", "pool_id", "findable_bytes", "referenced_bytes", "cached_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LIMITED_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTED_LEFT_BEHIND_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTED_RANKED_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTED_ORPHANED_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    FINDABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFERENCED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    num_layers: int
    page_bytes: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_limited: int
    num_evicted_left_behind: int
    num_evicted_ranked: int
    num_evicted_orphaned: int
    pool_id: int
    findable_bytes: int
    referenced_bytes: int
    cached_bytes: int
    def __init__(self, kind: _Optional[str] = ..., num_layers: _Optional[int] = ..., page_bytes: _Optional[int] = ..., num_queried_tokens: _Optional[int] = ..., num_hit_tokens: _Optional[int] = ..., num_limited: _Optional[int] = ..., num_evicted_left_behind: _Optional[int] = ..., num_evicted_ranked: _Optional[int] = ..., num_evicted_orphaned: _Optional[int] = ..., pool_id: _Optional[int] = ..., findable_bytes: _Optional[int] = ..., referenced_bytes: _Optional[int] = ..., cached_bytes: _Optional[int] = ...) -> None: ...

class KVPool(_message.Message):
    __slots__ = ("page_bytes", "referenced_bytes", "cached_bytes", "free_bytes")
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFERENCED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    page_bytes: int
    referenced_bytes: int
    cached_bytes: int
    free_bytes: int
    def __init__(self, page_bytes: _Optional[int] = ..., referenced_bytes: _Optional[int] = ..., cached_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ...) -> None: ...

class KVCache(_message.Message):
    __slots__ = ("referenced_bytes", "cached_bytes", "free_bytes", "pinned_bytes", "groups", "pools")
    REFERENCED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    referenced_bytes: int
    cached_bytes: int
    free_bytes: int
    pinned_bytes: int
    groups: _containers.RepeatedCompositeFieldContainer[KVGroup]
    pools: _containers.RepeatedCompositeFieldContainer[KVPool]
    def __init__(self, referenced_bytes: _Optional[int] = ..., cached_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[KVGroup, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[KVPool, _Mapping]]] = ...) -> None: ...

class Mac(_message.Message):
    __slots__ = ("name", "state", "model", "address", "epoch", "load", "blocks", "scheduling", "prefill_tokens_per_s", "worker_memory_bytes", "worker_pid", "decode_step_s", "hot_tokens", "drift", "note", "kv_cache", "kernels", "kernel_failures")
    class KernelFailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    WORKER_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKER_PID_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    HOT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRIFT_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FAILURES_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: MacState
    model: str
    address: str
    epoch: int
    load: Load
    blocks: Blocks
    scheduling: Scheduling
    prefill_tokens_per_s: float
    worker_memory_bytes: int
    worker_pid: int
    decode_step_s: float
    hot_tokens: int
    drift: Drift
    note: str
    kv_cache: KVCache
    kernels: str
    kernel_failures: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[MacState, str]] = ..., model: _Optional[str] = ..., address: _Optional[str] = ..., epoch: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., blocks: _Optional[_Union[Blocks, _Mapping]] = ..., scheduling: _Optional[_Union[Scheduling, _Mapping]] = ..., prefill_tokens_per_s: _Optional[float] = ..., worker_memory_bytes: _Optional[int] = ..., worker_pid: _Optional[int] = ..., decode_step_s: _Optional[float] = ..., hot_tokens: _Optional[int] = ..., drift: _Optional[_Union[Drift, _Mapping]] = ..., note: _Optional[str] = ..., kv_cache: _Optional[_Union[KVCache, _Mapping]] = ..., kernels: _Optional[str] = ..., kernel_failures: _Optional[_Mapping[str, int]] = ...) -> None: ...

class GetFleetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFleetResponse(_message.Message):
    __slots__ = ("macs",)
    MACS_FIELD_NUMBER: _ClassVar[int]
    macs: _containers.RepeatedCompositeFieldContainer[Mac]
    def __init__(self, macs: _Optional[_Iterable[_Union[Mac, _Mapping]]] = ...) -> None: ...

class GetIndexRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MacIndex(_message.Message):
    __slots__ = ("mac", "epoch", "next_seq", "num_blocks", "num_events", "num_gaps", "is_synced", "num_blocks_by_group", "num_no_effect_events", "num_repeated", "num_unknown_parents", "num_digest_mismatches")
    MAC_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQ_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_GAPS_FIELD_NUMBER: _ClassVar[int]
    IS_SYNCED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_BY_GROUP_FIELD_NUMBER: _ClassVar[int]
    NUM_NO_EFFECT_EVENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_REPEATED_FIELD_NUMBER: _ClassVar[int]
    NUM_UNKNOWN_PARENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DIGEST_MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    mac: str
    epoch: int
    next_seq: int
    num_blocks: int
    num_events: int
    num_gaps: int
    is_synced: bool
    num_blocks_by_group: _containers.RepeatedScalarFieldContainer[int]
    num_no_effect_events: int
    num_repeated: int
    num_unknown_parents: int
    num_digest_mismatches: int
    def __init__(self, mac: _Optional[str] = ..., epoch: _Optional[int] = ..., next_seq: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_events: _Optional[int] = ..., num_gaps: _Optional[int] = ..., is_synced: _Optional[bool] = ..., num_blocks_by_group: _Optional[_Iterable[int]] = ..., num_no_effect_events: _Optional[int] = ..., num_repeated: _Optional[int] = ..., num_unknown_parents: _Optional[int] = ..., num_digest_mismatches: _Optional[int] = ...) -> None: ...

class GetIndexResponse(_message.Message):
    __slots__ = ("num_keys", "macs")
    NUM_KEYS_FIELD_NUMBER: _ClassVar[int]
    MACS_FIELD_NUMBER: _ClassVar[int]
    num_keys: int
    macs: _containers.RepeatedCompositeFieldContainer[MacIndex]
    def __init__(self, num_keys: _Optional[int] = ..., macs: _Optional[_Iterable[_Union[MacIndex, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id", "text", "model")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    model: str
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class GroupDepth(_message.Message):
    __slots__ = ("group", "kind", "num_tokens")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    group: int
    kind: str
    num_tokens: int
    def __init__(self, group: _Optional[int] = ..., kind: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("mac", "num_matched_tokens", "num_prefill_tokens", "wait_s", "prefill_s", "decode_s", "total_s", "excluded", "num_held_tokens", "groups", "shared_s", "stall_s", "pressure_s")
    MAC_FIELD_NUMBER: _ClassVar[int]
    NUM_MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SHARED_S_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_S_FIELD_NUMBER: _ClassVar[int]
    mac: str
    num_matched_tokens: int
    num_prefill_tokens: int
    wait_s: float
    prefill_s: float
    decode_s: float
    total_s: float
    excluded: str
    num_held_tokens: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupDepth]
    shared_s: float
    stall_s: float
    pressure_s: float
    def __init__(self, mac: _Optional[str] = ..., num_matched_tokens: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., wait_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., total_s: _Optional[float] = ..., excluded: _Optional[str] = ..., num_held_tokens: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupDepth, _Mapping]]] = ..., shared_s: _Optional[float] = ..., stall_s: _Optional[float] = ..., pressure_s: _Optional[float] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request_id", "num_prompt_tokens", "chosen", "reason", "candidates", "policy")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_prompt_tokens: int
    chosen: str
    reason: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    policy: str
    def __init__(self, request_id: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., chosen: _Optional[str] = ..., reason: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., policy: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("mac",)
    MAC_FIELD_NUMBER: _ClassVar[int]
    mac: str
    def __init__(self, mac: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("mac",)
    MAC_FIELD_NUMBER: _ClassVar[int]
    mac: Mac
    def __init__(self, mac: _Optional[_Union[Mac, _Mapping]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("mac",)
    MAC_FIELD_NUMBER: _ClassVar[int]
    mac: str
    def __init__(self, mac: _Optional[str] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("mac",)
    MAC_FIELD_NUMBER: _ClassVar[int]
    mac: Mac
    def __init__(self, mac: _Optional[_Union[Mac, _Mapping]] = ...) -> None: ...

class CordonRequest(_message.Message):
    __slots__ = ("mac", "note")
    MAC_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    mac: str
    note: str
    def __init__(self, mac: _Optional[str] = ..., note: _Optional[str] = ...) -> None: ...

class CordonResponse(_message.Message):
    __slots__ = ("mac",)
    MAC_FIELD_NUMBER: _ClassVar[int]
    mac: Mac
    def __init__(self, mac: _Optional[_Union[Mac, _Mapping]] = ...) -> None: ...

class GetPlacementRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Placement(_message.Message):
    __slots__ = ("model", "macs")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MACS_FIELD_NUMBER: _ClassVar[int]
    model: str
    macs: _containers.RepeatedCompositeFieldContainer[PlacedMac]
    def __init__(self, model: _Optional[str] = ..., macs: _Optional[_Iterable[_Union[PlacedMac, _Mapping]]] = ...) -> None: ...

class PlacedMac(_message.Message):
    __slots__ = ("mac", "state")
    MAC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    mac: str
    state: MacState
    def __init__(self, mac: _Optional[str] = ..., state: _Optional[_Union[MacState, str]] = ...) -> None: ...

class GetPlacementResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Placement]
    def __init__(self, models: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    model: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "model", "path", "digest", "num_bytes", "macs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    MACS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    path: str
    digest: str
    num_bytes: int
    macs: _containers.RepeatedCompositeFieldContainer[AdapterOnMac]
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ..., num_bytes: _Optional[int] = ..., macs: _Optional[_Iterable[_Union[AdapterOnMac, _Mapping]]] = ...) -> None: ...

class AdapterOnMac(_message.Message):
    __slots__ = ("mac", "state", "problem")
    MAC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    mac: str
    state: AdapterState
    problem: str
    def __init__(self, mac: _Optional[str] = ..., state: _Optional[_Union[AdapterState, str]] = ..., problem: _Optional[str] = ...) -> None: ...
