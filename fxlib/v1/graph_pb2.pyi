from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Opcode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPCODE_UNSPECIFIED: _ClassVar[Opcode]
    OPCODE_PLACEHOLDER: _ClassVar[Opcode]
    OPCODE_GET_ATTR: _ClassVar[Opcode]
    OPCODE_CALL_FUNCTION: _ClassVar[Opcode]
    OPCODE_CALL_METHOD: _ClassVar[Opcode]
    OPCODE_CALL_MODULE: _ClassVar[Opcode]
    OPCODE_OUTPUT: _ClassVar[Opcode]
OPCODE_UNSPECIFIED: Opcode
OPCODE_PLACEHOLDER: Opcode
OPCODE_GET_ATTR: Opcode
OPCODE_CALL_FUNCTION: Opcode
OPCODE_CALL_METHOD: Opcode
OPCODE_CALL_MODULE: Opcode
OPCODE_OUTPUT: Opcode

class BlobRef(_message.Message):
    __slots__ = ("sha256", "size")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    size: int
    def __init__(self, sha256: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class Contract(_message.Message):
    __slots__ = ("pure", "reads", "writes", "commutes", "gradient", "batched_by", "returns", "batchable", "part", "part_at", "keys", "keys_at", "concurrent", "with_state", "update")
    PURE_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    COMMUTES_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    BATCHED_BY_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    BATCHABLE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PART_AT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KEYS_AT_FIELD_NUMBER: _ClassVar[int]
    CONCURRENT_FIELD_NUMBER: _ClassVar[int]
    WITH_STATE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    pure: bool
    reads: _containers.RepeatedScalarFieldContainer[str]
    writes: _containers.RepeatedScalarFieldContainer[str]
    commutes: bool
    gradient: str
    batched_by: str
    returns: Value
    batchable: bool
    part: str
    part_at: int
    keys: str
    keys_at: int
    concurrent: bool
    with_state: str
    update: str
    def __init__(self, pure: _Optional[bool] = ..., reads: _Optional[_Iterable[str]] = ..., writes: _Optional[_Iterable[str]] = ..., commutes: _Optional[bool] = ..., gradient: _Optional[str] = ..., batched_by: _Optional[str] = ..., returns: _Optional[_Union[Value, _Mapping]] = ..., batchable: _Optional[bool] = ..., part: _Optional[str] = ..., part_at: _Optional[int] = ..., keys: _Optional[str] = ..., keys_at: _Optional[int] = ..., concurrent: _Optional[bool] = ..., with_state: _Optional[str] = ..., update: _Optional[str] = ...) -> None: ...

class Graph(_message.Message):
    __slots__ = ("format", "modules", "tensors", "storages", "targets", "contracts", "texts", "clients")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    STORAGES_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    CONTRACTS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    format: int
    modules: _containers.RepeatedCompositeFieldContainer[Module]
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    storages: _containers.RepeatedCompositeFieldContainer[Storage]
    targets: _containers.RepeatedCompositeFieldContainer[Target]
    contracts: _containers.RepeatedCompositeFieldContainer[Contract]
    texts: _containers.RepeatedScalarFieldContainer[str]
    clients: _containers.RepeatedCompositeFieldContainer[Client]
    def __init__(self, format: _Optional[int] = ..., modules: _Optional[_Iterable[_Union[Module, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., storages: _Optional[_Iterable[_Union[Storage, _Mapping]]] = ..., targets: _Optional[_Iterable[_Union[Target, _Mapping]]] = ..., contracts: _Optional[_Iterable[_Union[Contract, _Mapping]]] = ..., texts: _Optional[_Iterable[str]] = ..., clients: _Optional[_Iterable[_Union[Client, _Mapping]]] = ...) -> None: ...

class Client(_message.Message):
    __slots__ = ("name", "function", "blocking", "issue", "wait", "parameters", "to")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    BLOCKING_FIELD_NUMBER: _ClassVar[int]
    ISSUE_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    name: str
    function: str
    blocking: str
    issue: str
    wait: str
    parameters: _containers.RepeatedCompositeFieldContainer[Parameter]
    to: str
    def __init__(self, name: _Optional[str] = ..., function: _Optional[str] = ..., blocking: _Optional[str] = ..., issue: _Optional[str] = ..., wait: _Optional[str] = ..., parameters: _Optional[_Iterable[_Union[Parameter, _Mapping]]] = ..., to: _Optional[str] = ...) -> None: ...

class Parameter(_message.Message):
    __slots__ = ("name", "kind", "optional", "text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OPTIONAL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: int
    optional: bool
    text: str
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[int] = ..., optional: _Optional[bool] = ..., text: _Optional[str] = ...) -> None: ...

class Module(_message.Message):
    __slots__ = ("graph", "leaf", "opaque", "parallel", "training", "parameters", "buffers", "children", "attributes")
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    LEAF_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    graph: Body
    leaf: str
    opaque: str
    parallel: DataParallel
    training: bool
    parameters: _containers.RepeatedCompositeFieldContainer[TensorSlot]
    buffers: _containers.RepeatedCompositeFieldContainer[TensorSlot]
    children: _containers.RepeatedCompositeFieldContainer[ModuleSlot]
    attributes: _containers.RepeatedCompositeFieldContainer[Attribute]
    def __init__(self, graph: _Optional[_Union[Body, _Mapping]] = ..., leaf: _Optional[str] = ..., opaque: _Optional[str] = ..., parallel: _Optional[_Union[DataParallel, _Mapping]] = ..., training: _Optional[bool] = ..., parameters: _Optional[_Iterable[_Union[TensorSlot, _Mapping]]] = ..., buffers: _Optional[_Iterable[_Union[TensorSlot, _Mapping]]] = ..., children: _Optional[_Iterable[_Union[ModuleSlot, _Mapping]]] = ..., attributes: _Optional[_Iterable[_Union[Attribute, _Mapping]]] = ...) -> None: ...

class DataParallel(_message.Message):
    __slots__ = ("group", "ranks", "forward_sync_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph", "skip_all_reduce_unused_params", "batched_grad_copy", "bucket_cap_mb", "hook", "oddity")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_SYNC_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    FIND_UNUSED_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_AS_BUCKET_VIEW_FIELD_NUMBER: _ClassVar[int]
    STATIC_GRAPH_FIELD_NUMBER: _ClassVar[int]
    SKIP_ALL_REDUCE_UNUSED_PARAMS_FIELD_NUMBER: _ClassVar[int]
    BATCHED_GRAD_COPY_FIELD_NUMBER: _ClassVar[int]
    BUCKET_CAP_MB_FIELD_NUMBER: _ClassVar[int]
    HOOK_FIELD_NUMBER: _ClassVar[int]
    ODDITY_FIELD_NUMBER: _ClassVar[int]
    group: str
    ranks: int
    forward_sync_buffers: bool
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    skip_all_reduce_unused_params: bool
    batched_grad_copy: bool
    bucket_cap_mb: float
    hook: str
    oddity: str
    def __init__(self, group: _Optional[str] = ..., ranks: _Optional[int] = ..., forward_sync_buffers: _Optional[bool] = ..., find_unused_parameters: _Optional[bool] = ..., gradient_as_bucket_view: _Optional[bool] = ..., static_graph: _Optional[bool] = ..., skip_all_reduce_unused_params: _Optional[bool] = ..., batched_grad_copy: _Optional[bool] = ..., bucket_cap_mb: _Optional[float] = ..., hook: _Optional[str] = ..., oddity: _Optional[str] = ...) -> None: ...

class TensorSlot(_message.Message):
    __slots__ = ("name", "tensor", "transient")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    TRANSIENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    tensor: int
    transient: bool
    def __init__(self, name: _Optional[str] = ..., tensor: _Optional[int] = ..., transient: _Optional[bool] = ...) -> None: ...

class ModuleSlot(_message.Message):
    __slots__ = ("name", "module")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    name: str
    module: int
    def __init__(self, name: _Optional[str] = ..., module: _Optional[int] = ...) -> None: ...

class Attribute(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: Value
    def __init__(self, name: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("storage", "dtype", "shape", "stride", "offset", "requires_grad", "parameter")
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_GRAD_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    storage: int
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    stride: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    requires_grad: bool
    parameter: bool
    def __init__(self, storage: _Optional[int] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., stride: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., requires_grad: _Optional[bool] = ..., parameter: _Optional[bool] = ...) -> None: ...

class Storage(_message.Message):
    __slots__ = ("bytes", "device", "data")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    device: str
    data: BlobRef
    def __init__(self, bytes: _Optional[int] = ..., device: _Optional[str] = ..., data: _Optional[_Union[BlobRef, _Mapping]] = ...) -> None: ...

class Target(_message.Message):
    __slots__ = ("function", "operator", "method", "path", "opaque_function", "opaque_method")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_FUNCTION_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_METHOD_FIELD_NUMBER: _ClassVar[int]
    function: str
    operator: str
    method: str
    path: str
    opaque_function: str
    opaque_method: str
    def __init__(self, function: _Optional[str] = ..., operator: _Optional[str] = ..., method: _Optional[str] = ..., path: _Optional[str] = ..., opaque_function: _Optional[str] = ..., opaque_method: _Optional[str] = ...) -> None: ...

class Body(_message.Message):
    __slots__ = ("nodes", "class_name", "pytree")
    NODES_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    PYTREE_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    class_name: str
    pytree: Pytree
    def __init__(self, nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., class_name: _Optional[str] = ..., pytree: _Optional[_Union[Pytree, _Mapping]] = ...) -> None: ...

class Pytree(_message.Message):
    __slots__ = ("arguments", "inputs", "outputs", "guards")
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    GUARDS_FIELD_NUMBER: _ClassVar[int]
    arguments: _containers.RepeatedScalarFieldContainer[str]
    inputs: Value
    outputs: Value
    guards: InputGuards
    def __init__(self, arguments: _Optional[_Iterable[str]] = ..., inputs: _Optional[_Union[Value, _Mapping]] = ..., outputs: _Optional[_Union[Value, _Mapping]] = ..., guards: _Optional[_Union[InputGuards, _Mapping]] = ...) -> None: ...

class InputGuards(_message.Message):
    __slots__ = ("leaves", "ranges", "conditions", "autocast", "values", "ordered")
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    AUTOCAST_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    ORDERED_FIELD_NUMBER: _ClassVar[int]
    leaves: _containers.RepeatedCompositeFieldContainer[InputGuard]
    ranges: _containers.RepeatedCompositeFieldContainer[SizeRange]
    conditions: _containers.RepeatedCompositeFieldContainer[Value]
    autocast: _containers.RepeatedCompositeFieldContainer[Autocast]
    values: _containers.RepeatedCompositeFieldContainer[ValueCondition]
    ordered: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, leaves: _Optional[_Iterable[_Union[InputGuard, _Mapping]]] = ..., ranges: _Optional[_Iterable[_Union[SizeRange, _Mapping]]] = ..., conditions: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., autocast: _Optional[_Iterable[_Union[Autocast, _Mapping]]] = ..., values: _Optional[_Iterable[_Union[ValueCondition, _Mapping]]] = ..., ordered: _Optional[_Iterable[str]] = ...) -> None: ...

class ValueCondition(_message.Message):
    __slots__ = ("steps", "answer", "source")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[QuestionStep]
    answer: bool
    source: str
    def __init__(self, steps: _Optional[_Iterable[_Union[QuestionStep, _Mapping]]] = ..., answer: _Optional[bool] = ..., source: _Optional[str] = ...) -> None: ...

class QuestionStep(_message.Message):
    __slots__ = ("operator", "args", "kwargs")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    KWARGS_FIELD_NUMBER: _ClassVar[int]
    operator: str
    args: _containers.RepeatedCompositeFieldContainer[Value]
    kwargs: _containers.RepeatedCompositeFieldContainer[Attribute]
    def __init__(self, operator: _Optional[str] = ..., args: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., kwargs: _Optional[_Iterable[_Union[Attribute, _Mapping]]] = ...) -> None: ...

class Autocast(_message.Message):
    __slots__ = ("device", "dtype")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    device: str
    dtype: str
    def __init__(self, device: _Optional[str] = ..., dtype: _Optional[str] = ...) -> None: ...

class InputGuard(_message.Message):
    __slots__ = ("tensor", "value")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    tensor: TensorGuard
    value: Value
    def __init__(self, tensor: _Optional[_Union[TensorGuard, _Mapping]] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class TensorGuard(_message.Message):
    __slots__ = ("dtype", "device", "contiguous", "sizes", "strides", "requires_grad", "same_as")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CONTIGUOUS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_GRAD_FIELD_NUMBER: _ClassVar[int]
    SAME_AS_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    device: str
    contiguous: bool
    sizes: _containers.RepeatedCompositeFieldContainer[Value]
    strides: _containers.RepeatedCompositeFieldContainer[Value]
    requires_grad: bool
    same_as: int
    def __init__(self, dtype: _Optional[str] = ..., device: _Optional[str] = ..., contiguous: _Optional[bool] = ..., sizes: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., strides: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., requires_grad: _Optional[bool] = ..., same_as: _Optional[int] = ...) -> None: ...

class SizeRange(_message.Message):
    __slots__ = ("symbol", "least", "greatest")
    SYMBOL_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    GREATEST_FIELD_NUMBER: _ClassVar[int]
    symbol: str
    least: int
    greatest: int
    def __init__(self, symbol: _Optional[str] = ..., least: _Optional[int] = ..., greatest: _Optional[int] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("op", "name", "target", "args", "kwargs", "type", "call", "contract", "order", "requires_grad", "source", "stack_trace", "tensor_meta", "folded", "rank", "backend")
    OP_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    KWARGS_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_GRAD_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    STACK_TRACE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_META_FIELD_NUMBER: _ClassVar[int]
    FOLDED_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    op: Opcode
    name: str
    target: int
    args: _containers.RepeatedCompositeFieldContainer[Value]
    kwargs: _containers.RepeatedCompositeFieldContainer[Attribute]
    type: TypeHint
    call: str
    contract: int
    order: int
    requires_grad: bool
    source: int
    stack_trace: int
    tensor_meta: Value
    folded: _containers.RepeatedScalarFieldContainer[str]
    rank: int
    backend: str
    def __init__(self, op: _Optional[_Union[Opcode, str]] = ..., name: _Optional[str] = ..., target: _Optional[int] = ..., args: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., kwargs: _Optional[_Iterable[_Union[Attribute, _Mapping]]] = ..., type: _Optional[_Union[TypeHint, _Mapping]] = ..., call: _Optional[str] = ..., contract: _Optional[int] = ..., order: _Optional[int] = ..., requires_grad: _Optional[bool] = ..., source: _Optional[int] = ..., stack_trace: _Optional[int] = ..., tensor_meta: _Optional[_Union[Value, _Mapping]] = ..., folded: _Optional[_Iterable[str]] = ..., rank: _Optional[int] = ..., backend: _Optional[str] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("none", "boolean", "integer", "real", "text", "node", "big_integer", "complex", "ellipsis", "list", "tuple", "dict", "slice", "range", "dtype", "layout", "memory_format", "qscheme", "device", "size", "operator", "named_tuple", "ordered_dict", "tensor_meta", "function", "tensor", "opaque", "container", "handle", "record")
    NONE_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    BIG_INTEGER_FIELD_NUMBER: _ClassVar[int]
    COMPLEX_FIELD_NUMBER: _ClassVar[int]
    ELLIPSIS_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    TUPLE_FIELD_NUMBER: _ClassVar[int]
    DICT_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FORMAT_FIELD_NUMBER: _ClassVar[int]
    QSCHEME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    NAMED_TUPLE_FIELD_NUMBER: _ClassVar[int]
    ORDERED_DICT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_META_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    none: bool
    boolean: bool
    integer: int
    real: float
    text: str
    node: int
    big_integer: bytes
    complex: Complex
    ellipsis: bool
    list: Values
    tuple: Values
    dict: Entries
    slice: Slice
    range: Range
    dtype: str
    layout: str
    memory_format: str
    qscheme: str
    device: str
    size: Shape
    operator: str
    named_tuple: NamedTuple
    ordered_dict: Entries
    tensor_meta: TensorMeta
    function: str
    tensor: int
    opaque: str
    container: Container
    handle: Handle
    record: NamedTuple
    def __init__(self, none: _Optional[bool] = ..., boolean: _Optional[bool] = ..., integer: _Optional[int] = ..., real: _Optional[float] = ..., text: _Optional[str] = ..., node: _Optional[int] = ..., big_integer: _Optional[bytes] = ..., complex: _Optional[_Union[Complex, _Mapping]] = ..., ellipsis: _Optional[bool] = ..., list: _Optional[_Union[Values, _Mapping]] = ..., tuple: _Optional[_Union[Values, _Mapping]] = ..., dict: _Optional[_Union[Entries, _Mapping]] = ..., slice: _Optional[_Union[Slice, _Mapping]] = ..., range: _Optional[_Union[Range, _Mapping]] = ..., dtype: _Optional[str] = ..., layout: _Optional[str] = ..., memory_format: _Optional[str] = ..., qscheme: _Optional[str] = ..., device: _Optional[str] = ..., size: _Optional[_Union[Shape, _Mapping]] = ..., operator: _Optional[str] = ..., named_tuple: _Optional[_Union[NamedTuple, _Mapping]] = ..., ordered_dict: _Optional[_Union[Entries, _Mapping]] = ..., tensor_meta: _Optional[_Union[TensorMeta, _Mapping]] = ..., function: _Optional[str] = ..., tensor: _Optional[int] = ..., opaque: _Optional[str] = ..., container: _Optional[_Union[Container, _Mapping]] = ..., handle: _Optional[_Union[Handle, _Mapping]] = ..., record: _Optional[_Union[NamedTuple, _Mapping]] = ...) -> None: ...

class Values(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, items: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class Handle(_message.Message):
    __slots__ = ("slot", "owner", "here")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    slot: str
    owner: str
    here: bool
    def __init__(self, slot: _Optional[str] = ..., owner: _Optional[str] = ..., here: _Optional[bool] = ...) -> None: ...

class Entries(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, items: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: Value
    value: Value
    def __init__(self, key: _Optional[_Union[Value, _Mapping]] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class Complex(_message.Message):
    __slots__ = ("real", "imag")
    REAL_FIELD_NUMBER: _ClassVar[int]
    IMAG_FIELD_NUMBER: _ClassVar[int]
    real: float
    imag: float
    def __init__(self, real: _Optional[float] = ..., imag: _Optional[float] = ...) -> None: ...

class Slice(_message.Message):
    __slots__ = ("start", "stop", "step")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    start: Value
    stop: Value
    step: Value
    def __init__(self, start: _Optional[_Union[Value, _Mapping]] = ..., stop: _Optional[_Union[Value, _Mapping]] = ..., step: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("start", "stop", "step")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    step: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Shape(_message.Message):
    __slots__ = ("sizes",)
    SIZES_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class NamedTuple(_message.Message):
    __slots__ = ("name", "fields", "items")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fields: _containers.RepeatedScalarFieldContainer[str]
    items: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, name: _Optional[str] = ..., fields: _Optional[_Iterable[str]] = ..., items: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class Container(_message.Message):
    __slots__ = ("name", "context", "items")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    context: Value
    items: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, name: _Optional[str] = ..., context: _Optional[_Union[Value, _Mapping]] = ..., items: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class TensorMeta(_message.Message):
    __slots__ = ("shape", "dtype", "requires_grad", "stride", "memory_format", "is_quantized", "qparams")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_GRAD_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FORMAT_FIELD_NUMBER: _ClassVar[int]
    IS_QUANTIZED_FIELD_NUMBER: _ClassVar[int]
    QPARAMS_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    requires_grad: bool
    stride: _containers.RepeatedScalarFieldContainer[int]
    memory_format: str
    is_quantized: bool
    qparams: Value
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., requires_grad: _Optional[bool] = ..., stride: _Optional[_Iterable[int]] = ..., memory_format: _Optional[str] = ..., is_quantized: _Optional[bool] = ..., qparams: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class TypeHint(_message.Message):
    __slots__ = ("name", "arguments")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments: _containers.RepeatedCompositeFieldContainer[TypeHint]
    def __init__(self, name: _Optional[str] = ..., arguments: _Optional[_Iterable[_Union[TypeHint, _Mapping]]] = ...) -> None: ...
