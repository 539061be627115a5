from fxlib.v1 import graph_pb2 as _graph_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_MODE_UNSPECIFIED: _ClassVar[StepMode]
    STEP_MODE_FORWARD: _ClassVar[StepMode]
    STEP_MODE_LOCAL: _ClassVar[StepMode]
    STEP_MODE_DISTRIBUTED: _ClassVar[StepMode]
STEP_MODE_UNSPECIFIED: StepMode
STEP_MODE_FORWARD: StepMode
STEP_MODE_LOCAL: StepMode
STEP_MODE_DISTRIBUTED: StepMode

class Workload(_message.Message):
    __slots__ = ("batches", "description", "loss", "optimizer", "mode", "threads", "trainers", "servers", "rrefs", "contracts", "assume", "seed", "accumulation", "clip_norm", "loss_scale", "pipeline", "ranges", "stale")
    class ContractsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _graph_pb2.Contract
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_graph_pb2.Contract, _Mapping]] = ...) -> None: ...
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    RREFS_FIELD_NUMBER: _ClassVar[int]
    CONTRACTS_FIELD_NUMBER: _ClassVar[int]
    ASSUME_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATION_FIELD_NUMBER: _ClassVar[int]
    CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    LOSS_SCALE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    batches: BatchBlobs
    description: BatchSpec
    loss: Loss
    optimizer: OptimizerSpec
    mode: StepMode
    threads: int
    trainers: int
    servers: _containers.RepeatedCompositeFieldContainer[ServerSpec]
    rrefs: _containers.RepeatedCompositeFieldContainer[RRefSpec]
    contracts: _containers.MessageMap[str, _graph_pb2.Contract]
    assume: str
    seed: int
    accumulation: int
    clip_norm: float
    loss_scale: float
    pipeline: int
    ranges: _containers.RepeatedCompositeFieldContainer[LayerRange]
    stale: int
    def __init__(self, batches: _Optional[_Union[BatchBlobs, _Mapping]] = ..., description: _Optional[_Union[BatchSpec, _Mapping]] = ..., loss: _Optional[_Union[Loss, _Mapping]] = ..., optimizer: _Optional[_Union[OptimizerSpec, _Mapping]] = ..., mode: _Optional[_Union[StepMode, str]] = ..., threads: _Optional[int] = ..., trainers: _Optional[int] = ..., servers: _Optional[_Iterable[_Union[ServerSpec, _Mapping]]] = ..., rrefs: _Optional[_Iterable[_Union[RRefSpec, _Mapping]]] = ..., contracts: _Optional[_Mapping[str, _graph_pb2.Contract]] = ..., assume: _Optional[str] = ..., seed: _Optional[int] = ..., accumulation: _Optional[int] = ..., clip_norm: _Optional[float] = ..., loss_scale: _Optional[float] = ..., pipeline: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[LayerRange, _Mapping]]] = ..., stale: _Optional[int] = ...) -> None: ...

class LayerRange(_message.Message):
    __slots__ = ("weights", "use", "least", "most", "values", "too_far", "shape")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    TOO_FAR_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    weights: _containers.RepeatedScalarFieldContainer[str]
    use: int
    least: float
    most: float
    values: int
    too_far: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, weights: _Optional[_Iterable[str]] = ..., use: _Optional[int] = ..., least: _Optional[float] = ..., most: _Optional[float] = ..., values: _Optional[int] = ..., too_far: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class BatchBlobs(_message.Message):
    __slots__ = ("batches",)
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[_graph_pb2.BlobRef]
    def __init__(self, batches: _Optional[_Iterable[_Union[_graph_pb2.BlobRef, _Mapping]]] = ...) -> None: ...

class BatchSpec(_message.Message):
    __slots__ = ("inputs", "kwargs", "target", "count", "nested")
    class KwargsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TensorSpec
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TensorSpec, _Mapping]] = ...) -> None: ...
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    KWARGS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    NESTED_FIELD_NUMBER: _ClassVar[int]
    inputs: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    kwargs: _containers.MessageMap[str, TensorSpec]
    target: TensorSpec
    count: int
    nested: NestedInputs
    def __init__(self, inputs: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., kwargs: _Optional[_Mapping[str, TensorSpec]] = ..., target: _Optional[_Union[TensorSpec, _Mapping]] = ..., count: _Optional[int] = ..., nested: _Optional[_Union[NestedInputs, _Mapping]] = ...) -> None: ...

class NestedInputs(_message.Message):
    __slots__ = ("structure", "tensors")
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    structure: _graph_pb2.Value
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    def __init__(self, structure: _Optional[_Union[_graph_pb2.Value, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("shape", "dtype", "low", "high", "repeats", "skew")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    SKEW_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    low: float
    high: float
    repeats: float
    skew: float
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., low: _Optional[float] = ..., high: _Optional[float] = ..., repeats: _Optional[float] = ..., skew: _Optional[float] = ...) -> None: ...

class Loss(_message.Message):
    __slots__ = ("name", "graph")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    name: str
    graph: _graph_pb2.BlobRef
    def __init__(self, name: _Optional[str] = ..., graph: _Optional[_Union[_graph_pb2.BlobRef, _Mapping]] = ...) -> None: ...

class OptimizerSpec(_message.Message):
    __slots__ = ("name", "lr", "momentum", "weight_decay")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    name: str
    lr: float
    momentum: float
    weight_decay: float
    def __init__(self, name: _Optional[str] = ..., lr: _Optional[float] = ..., momentum: _Optional[float] = ..., weight_decay: _Optional[float] = ...) -> None: ...

class ServerSpec(_message.Message):
    __slots__ = ("name", "tables", "dense", "setup", "service_time_s", "service_time_per")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    SETUP_FIELD_NUMBER: _ClassVar[int]
    SERVICE_TIME_S_FIELD_NUMBER: _ClassVar[int]
    SERVICE_TIME_PER_FIELD_NUMBER: _ClassVar[int]
    name: str
    tables: _containers.RepeatedCompositeFieldContainer[TableSpec]
    dense: _containers.RepeatedCompositeFieldContainer[DenseSpec]
    setup: str
    service_time_s: float
    service_time_per: str
    def __init__(self, name: _Optional[str] = ..., tables: _Optional[_Iterable[_Union[TableSpec, _Mapping]]] = ..., dense: _Optional[_Iterable[_Union[DenseSpec, _Mapping]]] = ..., setup: _Optional[str] = ..., service_time_s: _Optional[float] = ..., service_time_per: _Optional[str] = ...) -> None: ...

class TableSpec(_message.Message):
    __slots__ = ("name", "rows", "dim", "optimizer", "lr")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    name: str
    rows: int
    dim: int
    optimizer: str
    lr: float
    def __init__(self, name: _Optional[str] = ..., rows: _Optional[int] = ..., dim: _Optional[int] = ..., optimizer: _Optional[str] = ..., lr: _Optional[float] = ...) -> None: ...

class DenseSpec(_message.Message):
    __slots__ = ("name", "shape", "optimizer", "lr")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    optimizer: str
    lr: float
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., optimizer: _Optional[str] = ..., lr: _Optional[float] = ...) -> None: ...

class RRefSpec(_message.Message):
    __slots__ = ("name", "owner", "cls", "args", "kwargs")
    class KwargsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _graph_pb2.Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_graph_pb2.Value, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    CLS_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    KWARGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    cls: str
    args: _containers.RepeatedCompositeFieldContainer[_graph_pb2.Value]
    kwargs: _containers.MessageMap[str, _graph_pb2.Value]
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., cls: _Optional[str] = ..., args: _Optional[_Iterable[_Union[_graph_pb2.Value, _Mapping]]] = ..., kwargs: _Optional[_Mapping[str, _graph_pb2.Value]] = ...) -> None: ...
