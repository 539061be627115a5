from fxlib.v1 import graph_pb2 as _graph_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FindMissingRequest(_message.Message):
    __slots__ = ("blobs",)
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    blobs: _containers.RepeatedCompositeFieldContainer[_graph_pb2.BlobRef]
    def __init__(self, blobs: _Optional[_Iterable[_Union[_graph_pb2.BlobRef, _Mapping]]] = ...) -> None: ...

class FindMissingResponse(_message.Message):
    __slots__ = ("missing",)
    MISSING_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedCompositeFieldContainer[_graph_pb2.BlobRef]
    def __init__(self, missing: _Optional[_Iterable[_Union[_graph_pb2.BlobRef, _Mapping]]] = ...) -> None: ...

class QueryWriteRequest(_message.Message):
    __slots__ = ("blob",)
    BLOB_FIELD_NUMBER: _ClassVar[int]
    blob: _graph_pb2.BlobRef
    def __init__(self, blob: _Optional[_Union[_graph_pb2.BlobRef, _Mapping]] = ...) -> None: ...

class QueryWriteResponse(_message.Message):
    __slots__ = ("committed_bytes", "complete")
    COMMITTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    committed_bytes: int
    complete: bool
    def __init__(self, committed_bytes: _Optional[int] = ..., complete: _Optional[bool] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("blob", "offset", "data")
    BLOB_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    blob: _graph_pb2.BlobRef
    offset: int
    data: bytes
    def __init__(self, blob: _Optional[_Union[_graph_pb2.BlobRef, _Mapping]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ("committed_bytes",)
    COMMITTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    committed_bytes: int
    def __init__(self, committed_bytes: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("blob", "offset")
    BLOB_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    blob: _graph_pb2.BlobRef
    offset: int
    def __init__(self, blob: _Optional[_Union[_graph_pb2.BlobRef, _Mapping]] = ..., offset: _Optional[int] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
