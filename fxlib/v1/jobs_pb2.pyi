import datetime

from fxlib.v1 import graph_pb2 as _graph_pb2
from fxlib.v1 import profile_pb2 as _profile_pb2
from fxlib.v1 import workload_pb2 as _workload_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_QUEUED: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_SUCCEEDED: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_CANCELLED: _ClassVar[JobState]

class Decision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECISION_UNSPECIFIED: _ClassVar[Decision]
    DECISION_ADOPT: _ClassVar[Decision]
    DECISION_KEEP_ORIGINAL: _ClassVar[Decision]
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_QUEUED: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_SUCCEEDED: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_CANCELLED: JobState
DECISION_UNSPECIFIED: Decision
DECISION_ADOPT: Decision
DECISION_KEEP_ORIGINAL: Decision

class OptimizeRequest(_message.Message):
    __slots__ = ("request_id", "name", "namespace", "labels", "graph", "workload", "recipe", "trial", "torch_version", "fresh", "profile", "diffs", "variants", "where", "backends", "traceparent")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class WhereEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    RECIPE_FIELD_NUMBER: _ClassVar[int]
    TRIAL_FIELD_NUMBER: _ClassVar[int]
    TORCH_VERSION_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    DIFFS_FIELD_NUMBER: _ClassVar[int]
    VARIANTS_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    name: str
    namespace: str
    labels: _containers.ScalarMap[str, str]
    graph: _graph_pb2.BlobRef
    workload: _workload_pb2.Workload
    recipe: Recipe
    trial: TrialOptions
    torch_version: str
    fresh: bool
    profile: _profile_pb2.Profile
    diffs: bool
    variants: _containers.RepeatedCompositeFieldContainer[VariantRequest]
    where: _containers.ScalarMap[str, str]
    backends: _containers.RepeatedScalarFieldContainer[str]
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., name: _Optional[str] = ..., namespace: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., graph: _Optional[_Union[_graph_pb2.BlobRef, _Mapping]] = ..., workload: _Optional[_Union[_workload_pb2.Workload, _Mapping]] = ..., recipe: _Optional[_Union[Recipe, _Mapping]] = ..., trial: _Optional[_Union[TrialOptions, _Mapping]] = ..., torch_version: _Optional[str] = ..., fresh: _Optional[bool] = ..., profile: _Optional[_Union[_profile_pb2.Profile, _Mapping]] = ..., diffs: _Optional[bool] = ..., variants: _Optional[_Iterable[_Union[VariantRequest, _Mapping]]] = ..., where: _Optional[_Mapping[str, str]] = ..., backends: _Optional[_Iterable[str]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class VariantRequest(_message.Message):
    __slots__ = ("name", "graph", "workload", "profile")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    name: str
    graph: _graph_pb2.BlobRef
    workload: _workload_pb2.Workload
    profile: _profile_pb2.Profile
    def __init__(self, name: _Optional[str] = ..., graph: _Optional[_Union[_graph_pb2.BlobRef, _Mapping]] = ..., workload: _Optional[_Union[_workload_pb2.Workload, _Mapping]] = ..., profile: _Optional[_Union[_profile_pb2.Profile, _Mapping]] = ...) -> None: ...

class OptimizeResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class GetJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class WatchJobRequest(_message.Message):
    __slots__ = ("job_id", "after_sequence")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    after_sequence: int
    def __init__(self, job_id: _Optional[str] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class WatchJobResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: JobEvent
    def __init__(self, event: _Optional[_Union[JobEvent, _Mapping]] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("namespace", "labels", "states", "name", "page_size", "page_token", "id_prefix", "oldest_first")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ID_PREFIX_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    labels: _containers.ScalarMap[str, str]
    states: _containers.RepeatedScalarFieldContainer[JobState]
    name: str
    page_size: int
    page_token: str
    id_prefix: str
    oldest_first: bool
    def __init__(self, namespace: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., states: _Optional[_Iterable[_Union[JobState, str]]] = ..., name: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., id_prefix: _Optional[str] = ..., oldest_first: _Optional[bool] = ...) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs", "next_page_token")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    next_page_token: str
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CancelJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class CancelJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class RetryJobRequest(_message.Message):
    __slots__ = ("job_id", "request_id")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    request_id: str
    def __init__(self, job_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class RetryJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class ReportLiveRequest(_message.Message):
    __slots__ = ("job_id", "live")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    live: LiveFigures
    def __init__(self, job_id: _Optional[str] = ..., live: _Optional[_Union[LiveFigures, _Mapping]] = ...) -> None: ...

class ReportLiveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCapabilitiesResponse(_message.Message):
    __slots__ = ("fxlib_version", "torch_versions", "workers", "recipes", "max_blob_bytes", "max_graph_nodes")
    FXLIB_VERSION_FIELD_NUMBER: _ClassVar[int]
    TORCH_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    RECIPES_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOB_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_GRAPH_NODES_FIELD_NUMBER: _ClassVar[int]
    fxlib_version: str
    torch_versions: _containers.RepeatedScalarFieldContainer[str]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    recipes: _containers.RepeatedScalarFieldContainer[str]
    max_blob_bytes: int
    max_graph_nodes: int
    def __init__(self, fxlib_version: _Optional[str] = ..., torch_versions: _Optional[_Iterable[str]] = ..., workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., recipes: _Optional[_Iterable[str]] = ..., max_blob_bytes: _Optional[int] = ..., max_graph_nodes: _Optional[int] = ...) -> None: ...

class ListPassesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPassesResponse(_message.Message):
    __slots__ = ("passes", "recipes")
    PASSES_FIELD_NUMBER: _ClassVar[int]
    RECIPES_FIELD_NUMBER: _ClassVar[int]
    passes: _containers.RepeatedCompositeFieldContainer[PassInfo]
    recipes: _containers.RepeatedCompositeFieldContainer[RecipeInfo]
    def __init__(self, passes: _Optional[_Iterable[_Union[PassInfo, _Mapping]]] = ..., recipes: _Optional[_Iterable[_Union[RecipeInfo, _Mapping]]] = ...) -> None: ...

class PassInfo(_message.Message):
    __slots__ = ("name", "summary", "preserves", "needs", "options", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    PRESERVES_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    summary: str
    preserves: str
    needs: _containers.RepeatedScalarFieldContainer[str]
    options: _containers.RepeatedCompositeFieldContainer[OptionInfo]
    version: str
    def __init__(self, name: _Optional[str] = ..., summary: _Optional[str] = ..., preserves: _Optional[str] = ..., needs: _Optional[_Iterable[str]] = ..., options: _Optional[_Iterable[_Union[OptionInfo, _Mapping]]] = ..., version: _Optional[str] = ...) -> None: ...

class OptionInfo(_message.Message):
    __slots__ = ("name", "type", "default_value", "doc")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_VALUE_FIELD_NUMBER: _ClassVar[int]
    DOC_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: str
    default_value: str
    doc: str
    def __init__(self, name: _Optional[str] = ..., type: _Optional[str] = ..., default_value: _Optional[str] = ..., doc: _Optional[str] = ...) -> None: ...

class RecipeInfo(_message.Message):
    __slots__ = ("name", "summary", "passes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    name: str
    summary: str
    passes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., summary: _Optional[str] = ..., passes: _Optional[_Iterable[str]] = ...) -> None: ...

class Recipe(_message.Message):
    __slots__ = ("name", "passes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    name: str
    passes: _containers.RepeatedCompositeFieldContainer[PassSpec]
    def __init__(self, name: _Optional[str] = ..., passes: _Optional[_Iterable[_Union[PassSpec, _Mapping]]] = ...) -> None: ...

class PassSpec(_message.Message):
    __slots__ = ("name", "options", "rules")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _graph_pb2.Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_graph_pb2.Value, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    name: str
    options: _containers.MessageMap[str, _graph_pb2.Value]
    rules: _containers.RepeatedCompositeFieldContainer[Rule]
    def __init__(self, name: _Optional[str] = ..., options: _Optional[_Mapping[str, _graph_pb2.Value]] = ..., rules: _Optional[_Iterable[_Union[Rule, _Mapping]]] = ...) -> None: ...

class Rule(_message.Message):
    __slots__ = ("name", "pattern", "replacement", "guard")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    REPLACEMENT_FIELD_NUMBER: _ClassVar[int]
    GUARD_FIELD_NUMBER: _ClassVar[int]
    name: str
    pattern: _graph_pb2.Graph
    replacement: _graph_pb2.Graph
    guard: str
    def __init__(self, name: _Optional[str] = ..., pattern: _Optional[_Union[_graph_pb2.Graph, _Mapping]] = ..., replacement: _Optional[_Union[_graph_pb2.Graph, _Mapping]] = ..., guard: _Optional[str] = ...) -> None: ...

class TrialOptions(_message.Message):
    __slots__ = ("min_gain", "confidence", "budget_s", "sameness_steps", "step_timeout_s", "max_relative_error")
    MIN_GAIN_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    SAMENESS_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    MAX_RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    min_gain: float
    confidence: float
    budget_s: float
    sameness_steps: int
    step_timeout_s: float
    max_relative_error: float
    def __init__(self, min_gain: _Optional[float] = ..., confidence: _Optional[float] = ..., budget_s: _Optional[float] = ..., sameness_steps: _Optional[int] = ..., step_timeout_s: _Optional[float] = ..., max_relative_error: _Optional[float] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("id", "request_id", "name", "namespace", "labels", "state", "phase", "attempts", "worker_id", "created_at", "started_at", "finished_at", "result", "failure", "cached", "last_sequence", "asked_by", "measured_by", "live", "where", "waits_for")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class WhereEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ASKED_BY_FIELD_NUMBER: _ClassVar[int]
    MEASURED_BY_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    id: str
    request_id: str
    name: str
    namespace: str
    labels: _containers.ScalarMap[str, str]
    state: JobState
    phase: str
    attempts: int
    worker_id: str
    created_at: _timestamp_pb2.Timestamp
    started_at: _timestamp_pb2.Timestamp
    finished_at: _timestamp_pb2.Timestamp
    result: JobResult
    failure: JobFailure
    cached: bool
    last_sequence: int
    asked_by: str
    measured_by: str
    live: LiveFigures
    where: _containers.ScalarMap[str, str]
    waits_for: str
    def __init__(self, id: _Optional[str] = ..., request_id: _Optional[str] = ..., name: _Optional[str] = ..., namespace: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., state: _Optional[_Union[JobState, str]] = ..., phase: _Optional[str] = ..., attempts: _Optional[int] = ..., worker_id: _Optional[str] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finished_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., result: _Optional[_Union[JobResult, _Mapping]] = ..., failure: _Optional[_Union[JobFailure, _Mapping]] = ..., cached: _Optional[bool] = ..., last_sequence: _Optional[int] = ..., asked_by: _Optional[str] = ..., measured_by: _Optional[str] = ..., live: _Optional[_Union[LiveFigures, _Mapping]] = ..., where: _Optional[_Mapping[str, str]] = ..., waits_for: _Optional[str] = ...) -> None: ...

class LiveFigures(_message.Message):
    __slots__ = ("qps_original", "qps_optimized", "gain", "steps", "went_back", "at")
    QPS_ORIGINAL_FIELD_NUMBER: _ClassVar[int]
    QPS_OPTIMIZED_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WENT_BACK_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    qps_original: float
    qps_optimized: float
    gain: Estimate
    steps: int
    went_back: bool
    at: _timestamp_pb2.Timestamp
    def __init__(self, qps_original: _Optional[float] = ..., qps_optimized: _Optional[float] = ..., gain: _Optional[_Union[Estimate, _Mapping]] = ..., steps: _Optional[int] = ..., went_back: _Optional[bool] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class JobFailure(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class JobEvent(_message.Message):
    __slots__ = ("sequence", "at", "state", "phase", "message", "progress")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    at: _timestamp_pb2.Timestamp
    state: JobState
    phase: str
    message: str
    progress: float
    def __init__(self, sequence: _Optional[int] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., state: _Optional[_Union[JobState, str]] = ..., phase: _Optional[str] = ..., message: _Optional[str] = ..., progress: _Optional[float] = ...) -> None: ...

class Estimate(_message.Message):
    __slots__ = ("value", "low", "high")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    value: float
    low: float
    high: float
    def __init__(self, value: _Optional[float] = ..., low: _Optional[float] = ..., high: _Optional[float] = ...) -> None: ...

class JobResult(_message.Message):
    __slots__ = ("decision", "reason_code", "reason", "graph", "qps_original", "qps_optimized", "gain", "calls", "passes", "not_reproduced", "preserves", "assumptions", "timeline_original", "timeline_optimized", "blocks", "hardware", "torch_version", "phase_seconds", "timeline_bound", "bound_s", "candidates", "max_relative_error", "variants", "undeclared", "notes", "pipeline", "parts", "pays_after_steps", "pipeline_bound_s", "pipeline_limit", "instructions", "stale", "staleness")
    class PhaseSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class StalenessEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    DECISION_FIELD_NUMBER: _ClassVar[int]
    REASON_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    QPS_ORIGINAL_FIELD_NUMBER: _ClassVar[int]
    QPS_OPTIMIZED_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    NOT_REPRODUCED_FIELD_NUMBER: _ClassVar[int]
    PRESERVES_FIELD_NUMBER: _ClassVar[int]
    ASSUMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_ORIGINAL_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_OPTIMIZED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    TORCH_VERSION_FIELD_NUMBER: _ClassVar[int]
    PHASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_BOUND_FIELD_NUMBER: _ClassVar[int]
    BOUND_S_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    MAX_RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    VARIANTS_FIELD_NUMBER: _ClassVar[int]
    UNDECLARED_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PAYS_AFTER_STEPS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_BOUND_S_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    decision: Decision
    reason_code: str
    reason: str
    graph: _graph_pb2.BlobRef
    qps_original: Estimate
    qps_optimized: Estimate
    gain: Estimate
    calls: _containers.RepeatedCompositeFieldContainer[CallReport]
    passes: _containers.RepeatedCompositeFieldContainer[PassReport]
    not_reproduced: _containers.RepeatedScalarFieldContainer[str]
    preserves: str
    assumptions: _containers.RepeatedScalarFieldContainer[str]
    timeline_original: Timeline
    timeline_optimized: Timeline
    blocks: int
    hardware: str
    torch_version: str
    phase_seconds: _containers.ScalarMap[str, float]
    timeline_bound: Timeline
    bound_s: float
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    max_relative_error: float
    variants: _containers.RepeatedCompositeFieldContainer[VariantResult]
    undeclared: _containers.RepeatedCompositeFieldContainer[Undeclared]
    notes: _containers.RepeatedScalarFieldContainer[str]
    pipeline: int
    parts: _containers.RepeatedCompositeFieldContainer[CompiledPart]
    pays_after_steps: int
    pipeline_bound_s: float
    pipeline_limit: str
    instructions: _containers.RepeatedScalarFieldContainer[str]
    stale: int
    staleness: _containers.ScalarMap[int, int]
    def __init__(self, decision: _Optional[_Union[Decision, str]] = ..., reason_code: _Optional[str] = ..., reason: _Optional[str] = ..., graph: _Optional[_Union[_graph_pb2.BlobRef, _Mapping]] = ..., qps_original: _Optional[_Union[Estimate, _Mapping]] = ..., qps_optimized: _Optional[_Union[Estimate, _Mapping]] = ..., gain: _Optional[_Union[Estimate, _Mapping]] = ..., calls: _Optional[_Iterable[_Union[CallReport, _Mapping]]] = ..., passes: _Optional[_Iterable[_Union[PassReport, _Mapping]]] = ..., not_reproduced: _Optional[_Iterable[str]] = ..., preserves: _Optional[str] = ..., assumptions: _Optional[_Iterable[str]] = ..., timeline_original: _Optional[_Union[Timeline, _Mapping]] = ..., timeline_optimized: _Optional[_Union[Timeline, _Mapping]] = ..., blocks: _Optional[int] = ..., hardware: _Optional[str] = ..., torch_version: _Optional[str] = ..., phase_seconds: _Optional[_Mapping[str, float]] = ..., timeline_bound: _Optional[_Union[Timeline, _Mapping]] = ..., bound_s: _Optional[float] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., max_relative_error: _Optional[float] = ..., variants: _Optional[_Iterable[_Union[VariantResult, _Mapping]]] = ..., undeclared: _Optional[_Iterable[_Union[Undeclared, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., pipeline: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[CompiledPart, _Mapping]]] = ..., pays_after_steps: _Optional[int] = ..., pipeline_bound_s: _Optional[float] = ..., pipeline_limit: _Optional[str] = ..., instructions: _Optional[_Iterable[str]] = ..., stale: _Optional[int] = ..., staleness: _Optional[_Mapping[int, int]] = ...) -> None: ...

class CompiledPart(_message.Message):
    __slots__ = ("first", "nodes", "backend", "compile_s", "plain_s", "compiled_s", "compiled", "why")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    COMPILE_S_FIELD_NUMBER: _ClassVar[int]
    PLAIN_S_FIELD_NUMBER: _ClassVar[int]
    COMPILED_S_FIELD_NUMBER: _ClassVar[int]
    COMPILED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    first: str
    nodes: int
    backend: str
    compile_s: float
    plain_s: float
    compiled_s: float
    compiled: bool
    why: str
    def __init__(self, first: _Optional[str] = ..., nodes: _Optional[int] = ..., backend: _Optional[str] = ..., compile_s: _Optional[float] = ..., plain_s: _Optional[float] = ..., compiled_s: _Optional[float] = ..., compiled: _Optional[bool] = ..., why: _Optional[str] = ...) -> None: ...

class Undeclared(_message.Message):
    __slots__ = ("functions", "calls", "gain", "remedy", "measured")
    FUNCTIONS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    functions: _containers.RepeatedScalarFieldContainer[str]
    calls: int
    gain: float
    remedy: str
    measured: bool
    def __init__(self, functions: _Optional[_Iterable[str]] = ..., calls: _Optional[int] = ..., gain: _Optional[float] = ..., remedy: _Optional[str] = ..., measured: _Optional[bool] = ...) -> None: ...

class VariantResult(_message.Message):
    __slots__ = ("name", "result")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    name: str
    result: JobResult
    def __init__(self, name: _Optional[str] = ..., result: _Optional[_Union[JobResult, _Mapping]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("name", "predicted_step_s", "gain", "verdict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_STEP_S_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    predicted_step_s: float
    gain: Estimate
    verdict: str
    def __init__(self, name: _Optional[str] = ..., predicted_step_s: _Optional[float] = ..., gain: _Optional[_Union[Estimate, _Mapping]] = ..., verdict: _Optional[str] = ...) -> None: ...

class CallReport(_message.Message):
    __slots__ = ("node", "function", "to", "action", "reason_code", "reason", "remedy", "exposed_before_s", "exposed_after_s", "source", "detail", "limited_by_code", "limited_by", "limit_detail", "ahead_code", "ahead", "ahead_detail", "ahead_remedy", "way")
    NODE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASON_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_BEFORE_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LIMITED_BY_CODE_FIELD_NUMBER: _ClassVar[int]
    LIMITED_BY_FIELD_NUMBER: _ClassVar[int]
    LIMIT_DETAIL_FIELD_NUMBER: _ClassVar[int]
    AHEAD_CODE_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    AHEAD_DETAIL_FIELD_NUMBER: _ClassVar[int]
    AHEAD_REMEDY_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    node: str
    function: str
    to: str
    action: str
    reason_code: str
    reason: str
    remedy: str
    exposed_before_s: float
    exposed_after_s: float
    source: str
    detail: str
    limited_by_code: str
    limited_by: str
    limit_detail: str
    ahead_code: str
    ahead: str
    ahead_detail: str
    ahead_remedy: str
    way: str
    def __init__(self, node: _Optional[str] = ..., function: _Optional[str] = ..., to: _Optional[str] = ..., action: _Optional[str] = ..., reason_code: _Optional[str] = ..., reason: _Optional[str] = ..., remedy: _Optional[str] = ..., exposed_before_s: _Optional[float] = ..., exposed_after_s: _Optional[float] = ..., source: _Optional[str] = ..., detail: _Optional[str] = ..., limited_by_code: _Optional[str] = ..., limited_by: _Optional[str] = ..., limit_detail: _Optional[str] = ..., ahead_code: _Optional[str] = ..., ahead: _Optional[str] = ..., ahead_detail: _Optional[str] = ..., ahead_remedy: _Optional[str] = ..., way: _Optional[str] = ...) -> None: ...

class PassReport(_message.Message):
    __slots__ = ("name", "changes", "seconds", "declined", "diff", "sensitivity")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    DIFF_FIELD_NUMBER: _ClassVar[int]
    SENSITIVITY_FIELD_NUMBER: _ClassVar[int]
    name: str
    changes: int
    seconds: float
    declined: _containers.RepeatedCompositeFieldContainer[Declined]
    diff: str
    sensitivity: _containers.RepeatedCompositeFieldContainer[Sensitivity]
    def __init__(self, name: _Optional[str] = ..., changes: _Optional[int] = ..., seconds: _Optional[float] = ..., declined: _Optional[_Iterable[_Union[Declined, _Mapping]]] = ..., diff: _Optional[str] = ..., sensitivity: _Optional[_Iterable[_Union[Sensitivity, _Mapping]]] = ...) -> None: ...

class Sensitivity(_message.Message):
    __slots__ = ("nodes", "error", "lossy")
    NODES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    error: float
    lossy: bool
    def __init__(self, nodes: _Optional[_Iterable[str]] = ..., error: _Optional[float] = ..., lossy: _Optional[bool] = ...) -> None: ...

class Declined(_message.Message):
    __slots__ = ("node", "reason_code", "reason", "remedy", "detail")
    NODE_FIELD_NUMBER: _ClassVar[int]
    REASON_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    node: str
    reason_code: str
    reason: str
    remedy: str
    detail: str
    def __init__(self, node: _Optional[str] = ..., reason_code: _Optional[str] = ..., reason: _Optional[str] = ..., remedy: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("spans", "step_s", "steps")
    SPANS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    step_s: float
    steps: int
    def __init__(self, spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., step_s: _Optional[float] = ..., steps: _Optional[int] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("kind", "name", "to", "start_s", "end_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    to: str
    start_s: float
    end_s: float
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., to: _Optional[str] = ..., start_s: _Optional[float] = ..., end_s: _Optional[float] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "torch_version", "hardware", "allowed_modules", "fxlib_version", "containment", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TORCH_VERSION_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_MODULES_FIELD_NUMBER: _ClassVar[int]
    FXLIB_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTAINMENT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    torch_version: str
    hardware: str
    allowed_modules: _containers.RepeatedScalarFieldContainer[str]
    fxlib_version: str
    containment: str
    labels: _containers.ScalarMap[str, str]
    def __init__(self, worker_id: _Optional[str] = ..., torch_version: _Optional[str] = ..., hardware: _Optional[str] = ..., allowed_modules: _Optional[_Iterable[str]] = ..., fxlib_version: _Optional[str] = ..., containment: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...
