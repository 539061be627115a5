from fxlib.v1 import jobs_pb2 as _jobs_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClaimRequest(_message.Message):
    __slots__ = ("worker", "wait_s")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    worker: _jobs_pb2.WorkerInfo
    wait_s: float
    def __init__(self, worker: _Optional[_Union[_jobs_pb2.WorkerInfo, _Mapping]] = ..., wait_s: _Optional[float] = ...) -> None: ...

class ClaimResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("job_id", "token", "duration_s", "request", "attempt")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    token: str
    duration_s: float
    request: _jobs_pb2.OptimizeRequest
    attempt: int
    def __init__(self, job_id: _Optional[str] = ..., token: _Optional[str] = ..., duration_s: _Optional[float] = ..., request: _Optional[_Union[_jobs_pb2.OptimizeRequest, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("job_id", "token")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    token: str
    def __init__(self, job_id: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("cancelled", "duration_s")
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    cancelled: bool
    duration_s: float
    def __init__(self, cancelled: _Optional[bool] = ..., duration_s: _Optional[float] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("job_id", "token", "phase", "message", "progress")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    token: str
    phase: str
    message: str
    progress: float
    def __init__(self, job_id: _Optional[str] = ..., token: _Optional[str] = ..., phase: _Optional[str] = ..., message: _Optional[str] = ..., progress: _Optional[float] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("job_id", "token", "result", "failure")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    token: str
    result: _jobs_pb2.JobResult
    failure: _jobs_pb2.JobFailure
    def __init__(self, job_id: _Optional[str] = ..., token: _Optional[str] = ..., result: _Optional[_Union[_jobs_pb2.JobResult, _Mapping]] = ..., failure: _Optional[_Union[_jobs_pb2.JobFailure, _Mapping]] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("job_id", "token")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    token: str
    def __init__(self, job_id: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
