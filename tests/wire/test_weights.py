"""No weight leaves a process unless asked; what is asked for comes back to the bit."""

import hashlib
import pickle
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

from fxlib import wire
from fxlib.errors import WireError
from tests.wire.support import graph_of, round_trip

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.float8_e4m3fn,
]  # fmt: skip


def holding(tensor: torch.Tensor) -> GraphModule:
    root = nn.Module()
    root.register_buffer("data", tensor)
    return graph_of(lambda graph, x: graph.get_attr("data"), root)


def test_by_default_only_dtype_shape_and_flags_travel() -> None:
    secret = torch.tensor([1234.5678, 8765.4321], dtype=torch.float64)
    encoded = wire.encode(holding(secret))
    assert encoded.blobs == {}
    assert secret.numpy().tobytes()[:8] not in wire.serialize(encoded.graph)
    assert list(encoded.graph.tensors[0].shape) == [2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_dtype_comes_back_to_the_bit(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 255, (6, 16), dtype=torch.uint8).view(torch.uint8)
    tensor = tensor.clamp(max=1).view(dtype) if dtype is torch.bool else tensor.view(dtype)
    found = round_trip(holding(tensor)).data
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("tensor", [torch.tensor(3.0), torch.empty(0, 4), torch.ones(1).expand(3, 4)], ids=str)
def test_scalars_empty_and_expanded_tensors_come_back(tensor: torch.Tensor) -> None:
    found = round_trip(holding(tensor)).data
    assert torch.equal(found, tensor)
    assert found.stride() == tensor.stride()


def test_blobs_are_safetensors_files_named_by_their_digest() -> None:
    encoded = wire.encode(symbolic_trace(nn.Linear(3, 2)), weights=True)
    assert len(encoded.blobs) == 2
    for name, blob in encoded.blobs.items():
        assert hashlib.sha256(blob).hexdigest() == name
        assert list(safetensors.torch.load(blob)) == ["data"]


def test_equal_tensors_share_a_blob_and_stay_apart() -> None:
    class Duplicates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: Any) -> Any:
            return self.a * x + self.b

    module = symbolic_trace(Duplicates())
    assert len(wire.encode(module, weights=True).blobs) == 1
    decoded = round_trip(module)
    assert decoded.a.data_ptr() != decoded.b.data_ptr()


def test_weights_that_were_not_sent_are_drawn_so_that_activations_stay_sane() -> None:
    layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()] * 6
    module = symbolic_trace(nn.Sequential(*layers)).eval()
    decoded = wire.decode(wire.encode(module).graph, seed=1)
    other = wire.decode(wire.encode(module).graph, seed=2)
    outputs = decoded(torch.randn(8, 64))
    assert outputs.isfinite().all()
    assert 1e-3 < outputs.abs().max() < 1e3
    assert not torch.equal(next(decoded.parameters()), next(other.parameters()))


def encoded_linear() -> wire.Encoded:
    return wire.encode(symbolic_trace(nn.Linear(3, 2)), weights=True)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was opened",))


def test_a_missing_blob_is_named() -> None:
    with pytest.raises(WireError, match=r"tensor 'weight': blob [0-9a-f]{64} is missing"):
        wire.decode(encoded_linear().graph)


@pytest.mark.parametrize(
    "content",
    [
        b"", pickle.dumps(Bomb()), b"\xff" * 100, safetensors.torch.save({"other": torch.ones(6)}),
        safetensors.torch.save({"data": torch.ones(5)}), safetensors.torch.save({"data": torch.ones(2, 3)}),
        (1 << 62).to_bytes(8, "little") + b"{}", b"\x02\0\0\0\0\0\0\0{}",
    ],
)  # fmt: skip
def test_a_blob_that_is_not_what_it_should_be_is_refused(content: bytes) -> None:
    encoded = encoded_linear()
    blobs = {**encoded.blobs, encoded.graph.storages[0].data.sha256: content}
    with pytest.raises(WireError, match="not match its digest"):
        wire.decode(encoded.graph, blobs=blobs)
    reference = encoded.graph.storages[0].data
    reference.sha256, reference.size = hashlib.sha256(content).hexdigest(), len(content)
    with pytest.raises(WireError, match="tensor 'weight'"):
        wire.decode(encoded.graph, blobs={**encoded.blobs, reference.sha256: content})


def test_weights_on_the_meta_device_have_no_values_to_send() -> None:
    module = symbolic_trace(nn.Linear(3, 2, device="meta"))
    assert wire.decode(wire.encode(module).graph).weight.is_meta
    with pytest.raises(WireError, match=r"weights\['weight'\]: a tensor on the meta device"):
        wire.encode(module, weights=True)


def test_weights_whose_memory_is_freed_have_no_values_to_send() -> None:
    module = symbolic_trace(nn.Sequential(nn.Linear(3, 2)))
    memory = module.get_parameter("0.weight").untyped_storage()
    memory.resize_(0)
    assert wire.decode(wire.encode(module).graph).get_parameter("0.weight").shape == (2, 3)
    with pytest.raises(WireError, match=r"weights\['0\.weight'\]: its memory was freed"):
        wire.encode(module, weights=True)
    assert memory.nbytes() == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a device that is not there")
def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    graph = encoded_linear().graph
    for storage in graph.storages:
        storage.device = "cuda:0"
        storage.ClearField("data")
    with pytest.raises(WireError, match="tensor 'weight': device cuda:0"):
        wire.decode(graph)


def test_a_gradient_never_travels() -> None:
    module = symbolic_trace(nn.Linear(3, 2))
    bare = wire.digest(wire.encode(module, weights=True).graph)
    module(torch.ones(1, 3)).sum().backward()
    assert wire.digest(wire.encode(module, weights=True).graph) == bare
    assert isinstance(module.graph, Graph)
