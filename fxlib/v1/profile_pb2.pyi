from fxlib.v1 import graph_pb2 as _graph_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Profile(_message.Message):
    __slots__ = ("calls", "nodes", "servers", "loss_s", "backward_s", "rest_s", "steps", "hardware", "torch_version", "notes", "step_s", "least_share", "cores_s")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    LOSS_S_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_S_FIELD_NUMBER: _ClassVar[int]
    REST_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    TORCH_VERSION_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    LEAST_SHARE_FIELD_NUMBER: _ClassVar[int]
    CORES_S_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[CallProfile]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeProfile]
    servers: _containers.RepeatedCompositeFieldContainer[ServerProfile]
    loss_s: float
    backward_s: float
    rest_s: float
    steps: int
    hardware: str
    torch_version: str
    notes: _containers.RepeatedScalarFieldContainer[str]
    step_s: float
    least_share: float
    cores_s: float
    def __init__(self, calls: _Optional[_Iterable[_Union[CallProfile, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[NodeProfile, _Mapping]]] = ..., servers: _Optional[_Iterable[_Union[ServerProfile, _Mapping]]] = ..., loss_s: _Optional[float] = ..., backward_s: _Optional[float] = ..., rest_s: _Optional[float] = ..., steps: _Optional[int] = ..., hardware: _Optional[str] = ..., torch_version: _Optional[str] = ..., notes: _Optional[_Iterable[str]] = ..., step_s: _Optional[float] = ..., least_share: _Optional[float] = ..., cores_s: _Optional[float] = ...) -> None: ...

class CallProfile(_message.Message):
    __slots__ = ("call", "function", "to", "request_bytes", "response_bytes", "returns", "issue_s", "wait_s", "service_s", "push", "wake_s")
    CALL_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    ISSUE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    SERVICE_S_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    WAKE_S_FIELD_NUMBER: _ClassVar[int]
    call: str
    function: str
    to: str
    request_bytes: int
    response_bytes: int
    returns: Returned
    issue_s: float
    wait_s: float
    service_s: Spread
    push: PushProfile
    wake_s: float
    def __init__(self, call: _Optional[str] = ..., function: _Optional[str] = ..., to: _Optional[str] = ..., request_bytes: _Optional[int] = ..., response_bytes: _Optional[int] = ..., returns: _Optional[_Union[Returned, _Mapping]] = ..., issue_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., service_s: _Optional[_Union[Spread, _Mapping]] = ..., push: _Optional[_Union[PushProfile, _Mapping]] = ..., wake_s: _Optional[float] = ...) -> None: ...

class PushProfile(_message.Message):
    __slots__ = ("function", "request_bytes", "issue_s", "service_s", "ready_s")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    ISSUE_S_FIELD_NUMBER: _ClassVar[int]
    SERVICE_S_FIELD_NUMBER: _ClassVar[int]
    READY_S_FIELD_NUMBER: _ClassVar[int]
    function: str
    request_bytes: int
    issue_s: float
    service_s: Spread
    ready_s: float
    def __init__(self, function: _Optional[str] = ..., request_bytes: _Optional[int] = ..., issue_s: _Optional[float] = ..., service_s: _Optional[_Union[Spread, _Mapping]] = ..., ready_s: _Optional[float] = ...) -> None: ...

class ServerProfile(_message.Message):
    __slots__ = ("name", "round_trip_s", "concurrency", "bytes_per_s", "per_item_s", "per_call_s", "per_turn_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PER_ITEM_S_FIELD_NUMBER: _ClassVar[int]
    PER_CALL_S_FIELD_NUMBER: _ClassVar[int]
    PER_TURN_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    round_trip_s: float
    concurrency: int
    bytes_per_s: float
    per_item_s: float
    per_call_s: float
    per_turn_s: float
    def __init__(self, name: _Optional[str] = ..., round_trip_s: _Optional[float] = ..., concurrency: _Optional[int] = ..., bytes_per_s: _Optional[float] = ..., per_item_s: _Optional[float] = ..., per_call_s: _Optional[float] = ..., per_turn_s: _Optional[float] = ...) -> None: ...

class NodeProfile(_message.Message):
    __slots__ = ("node", "seconds", "output_bytes")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    node: str
    seconds: float
    output_bytes: int
    def __init__(self, node: _Optional[str] = ..., seconds: _Optional[float] = ..., output_bytes: _Optional[int] = ...) -> None: ...

class Spread(_message.Message):
    __slots__ = ("quantiles", "count")
    QUANTILES_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    quantiles: _containers.RepeatedScalarFieldContainer[float]
    count: int
    def __init__(self, quantiles: _Optional[_Iterable[float]] = ..., count: _Optional[int] = ...) -> None: ...

class Returned(_message.Message):
    __slots__ = ("tensor", "value", "tuple", "list", "fields")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    TUPLE_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    tensor: TensorShape
    value: _graph_pb2.Value
    tuple: ReturnedItems
    list: ReturnedItems
    fields: ReturnedFields
    def __init__(self, tensor: _Optional[_Union[TensorShape, _Mapping]] = ..., value: _Optional[_Union[_graph_pb2.Value, _Mapping]] = ..., tuple: _Optional[_Union[ReturnedItems, _Mapping]] = ..., list: _Optional[_Union[ReturnedItems, _Mapping]] = ..., fields: _Optional[_Union[ReturnedFields, _Mapping]] = ...) -> None: ...

class TensorShape(_message.Message):
    __slots__ = ("shape", "dtype", "requires_grad")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_GRAD_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    requires_grad: bool
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., requires_grad: _Optional[bool] = ...) -> None: ...

class ReturnedItems(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Returned]
    def __init__(self, items: _Optional[_Iterable[_Union[Returned, _Mapping]]] = ...) -> None: ...

class ReturnedFields(_message.Message):
    __slots__ = ("fields",)
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    fields: _containers.RepeatedCompositeFieldContainer[ReturnedField]
    def __init__(self, fields: _Optional[_Iterable[_Union[ReturnedField, _Mapping]]] = ...) -> None: ...

class ReturnedField(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: Returned
    def __init__(self, name: _Optional[str] = ..., value: _Optional[_Union[Returned, _Mapping]] = ...) -> None: ...
