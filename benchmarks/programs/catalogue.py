"""The programs: which file each is, how its model is made, what it is given, and how an expert would write it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from typing_extensions import override

import fxlib
from benchmarks.programs.loading import load, wrapped_on_processors
from fxlib.spec.workload import Batch, Mode

_TESTED: Final = "torch.testing._internal.distributed.ddp_under_dist_autograd_test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program.

    Attributes:
        name: of the program.
        path: how the path of its file ends.
        holds: a text in that file.
        servers: names of the workers that it calls.
        make: makes the model, of the module that the file is, in the launcher.
        batch: makes what a step is given.
        mode: which autograd its step runs.
        contracts: what the launcher says of its remote functions, by name; "program" stands for its module.
        hand: an expert's forward, of the model; None: there is no more than one call at a time to make.
        parallel: whether a part of it is wrapped into `DistributedDataParallel`.
        prepare: makes up, in each process, for releases of libraries that the program was not written for.
        is_random: whether its servers draw random numbers in an evaluation, too.
    """

    name: str
    path: str
    holds: str
    servers: tuple[str, ...]
    make: Callable[[ModuleType], nn.Module]
    batch: Callable[[], Batch]
    mode: Mode = "distributed"
    contracts: Mapping[str, fxlib.Contract] = field(default_factory=dict)
    hand: Callable[[nn.Module], Callable[..., Any]] | None = None
    parallel: bool = False
    prepare: Callable[[], None] | None = None
    is_random: bool = False

    @property
    def launchers(self) -> int:
        """How many launchers train together."""
        return 2 if self.parallel else 1

    def load(self, sources: Path) -> ModuleType:
        """Import the program's file, under a name that is the same in all processes.

        Raises:
            FileNotFoundError: `sources` has no such file.
            Exception: whatever importing it raises.
        """
        module = load(self.name, self.path, self.holds, sources)
        if self.prepare is not None:
            self.prepare()
        if "DDP" in vars(module):
            module.DDP = wrapped_on_processors  # type: ignore[attr-defined]
        return module


def bags() -> Batch:
    """Rows of an embedding bag of 100 or more, in 50 bags of 4, and their classes."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 100, (200,), generator=generator)
    target = torch.randint(0, 8, (50,), generator=generator)
    return Batch(inputs=(rows, torch.arange(0, 200, 4)), target=target)


def hybrid(module: ModuleType) -> nn.Module:
    """Eight tables over four servers, as the benchmark's master makes them."""
    tables = [
        rpc.remote(f"ps{index % 4}", nn.EmbeddingBag, (module.NUM_EMBEDDINGS, module.EMBEDDING_DIM), {"mode": "sum"})
        for index in range(8)
    ]
    model: nn.Module = module.HybridModel(tables, "cpu")
    return model


def hybrid_by_hand(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """All lookups issued, then all awaited."""

    def forward(rows: Tensor, offsets: Tensor) -> Tensor:
        futures = [table.rpc_async().forward(rows, offsets) for table in model.emb_rref_list]
        found = torch.cat([future.wait() for future in futures], dim=1)
        result: Tensor = model.ddp(found.reshape(len(offsets), 512))
        return result

    return forward


def remote_table(module: ModuleType) -> nn.Module:
    """One remote table below a layer."""
    table = RemoteModule("ps", nn.EmbeddingBag, (module.NUM_EMBEDDINGS, module.EMBEDDING_DIM), {"mode": "sum"})
    model: nn.Module = module.HybridModel(table, "cpu")
    return model


def images() -> Batch:
    """Digits."""
    generator = torch.Generator().manual_seed(0)
    return Batch(
        inputs=(torch.randn(32, 1, 28, 28, generator=generator),),
        target=torch.randint(0, 10, (32,), generator=generator),
    )


def words() -> Batch:
    """A batch of a language model, with the state of two layers."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.zeros(2, 3, 200), torch.zeros(2, 3, 200)
    return Batch(inputs=(torch.randint(0, 10, (35, 3), generator=generator), hidden))


def tested(module: ModuleType) -> nn.Module:
    """A remote table, a local layer, a remote layer, a local layer."""
    table = rpc.remote("ps0", module.RemoteEM, (module.NUM_EM_ROW, module.D_SPARSE))
    layer = rpc.remote("ps1", module.RemoteNet, (module.D_DENSE + module.D_SPARSE, module.D_HID))
    model: nn.Module = module.HybridModel(table, layer)
    return model


def features() -> Batch:
    """Dense and sparse features, as the named tuple of PyTorch's own test."""
    feature_set = importlib.import_module(_TESTED).FeatureSet
    dense = torch.linspace(-1, 1, 16).view(8, 2)
    return Batch(inputs=(feature_set(dense, torch.zeros(8, dtype=torch.long), torch.zeros(8)),))


def recommender(module: ModuleType) -> nn.Module:
    """Eight tables, two to each of four servers."""
    with contextlib.redirect_stdout(None):
        rows = np.array([100] * 8)
        tables = [
            rpc.remote(f"ps{each}", module.Emb, (64, rows, [2 * each, 2 * each + 1], False, 0)) for each in range(4)
        ]
        sizes = {"ln_emb": rows, "ln_bot": np.array([13, 256, 64]), "ln_top": np.array([64 + 36, 256, 1])}
        model: nn.Module = module.DLRM_RPC(tables, 0, False, **sizes, arch_interaction_op="dot", sigmoid_top=1)
    return model


def clicks() -> Batch:
    """Dense features, and offsets and rows of eight tables."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 100, (64,), generator=generator) for _ in range(8)]
    return Batch(
        inputs=(torch.randn(64, 13, generator=generator), [torch.arange(64)] * 8, rows),
        target=torch.randint(0, 2, (64, 1), generator=generator).float(),
    )


class Forward(nn.Module):
    """The forward of a program that has a class of its own for it."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self.program = program

    @override
    def forward(self, tokens: Tensor) -> Any:
        return self.program.forward(tokens)


def stages(module: ModuleType) -> nn.Module:
    """A small GPT in eight stages, one after another on two workers."""
    with contextlib.redirect_stdout(None):
        config = module.GPTConfig(n_head=2, n_embd=32)
        return Forward(module.RPCPipeline(config, ["ps0", "ps1"] * 4, ["cpu"] * 8))


def tokens() -> Batch:
    """Letters, and those that follow them."""
    generator = torch.Generator().manual_seed(0)
    return Batch(inputs=(torch.randint(0, 65, (4, 16), generator=generator),))


def halves(module: ModuleType) -> nn.Module:
    """BERT in two halves, with random weights, narrow where the program does not say how wide."""
    from transformers.models.bert import BertConfig, BertModel  # of this program alone

    with tempfile.TemporaryDirectory() as folder:
        BertModel(BertConfig(vocab_size=100, intermediate_size=64)).save_pretrained(folder)
        model = module.DistBertOri(folder, folder, 6, 8, 2, {"cloud": "cpu", "edge": "cpu"})
        for half in (model.front_ref, model.back_ref):
            half.rpc_sync().parameter_rrefs()  # it is there, and has read its weights
    return cast(nn.Module, model)


def sentences() -> Batch:
    """Words, the sentences that they are of, what is a word at all, and a class."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 100, (2, 8), generator=generator)
    return Batch(
        inputs=(words, torch.zeros_like(words), torch.ones(2, 8)), target=torch.randint(0, 2, (2,), generator=generator)
    )


def layers_of_transformers_4() -> None:
    """Let layers return a tuple, as they did when programs were written that take its first part."""
    from transformers.models.bert.modeling_bert import BertLayer  # of this program alone

    layer: Any = BertLayer
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: (forward(*args, **kwargs),)


def recommender_by_hand(model: Any) -> Callable[..., Any]:
    """All lookups issued, the dense part below them, then all awaited."""

    def forward(dense: Tensor, offsets: list[Tensor], rows: list[Tensor]) -> Any:
        futures = [each.rpc_async().forward(offsets, rows) for each in model.emb_rref]
        x = model.bot_mlp_ddp(dense)
        found = [0] * model.ln.size
        for future in futures:
            tables, places = future.wait()
            for table, place in zip(tables, places, strict=True):
                found[place] = table
        p = model.top_mlp_ddp(model.interact_features(x, found))
        return torch.clamp(p, min=model.loss_threshold, max=(1.0 - model.loss_threshold))

    return forward


def sentence_pairs() -> Batch:
    """Sentences, and those that they are translated into, word by word."""
    source = torch.tensor([[1, 2, 3, 4, 0], [1, 2, 3, 5, 0]] * 4)
    target = torch.tensor([[6, 1, 2, 3, 4, 8, 7], [6, 1, 2, 3, 5, 8, 7]] * 4)
    return Batch(inputs=(source, target[:, :-1]), target=target[:, 1:].flatten())


def layers_of_a_transformer() -> None:
    """Make, in each process, the layers that are one server's, as the program's launchers do."""
    sys.modules["program_transformer"].initialize_layer_objects(32, 2, 4, 64, 8, 8, 1)


def transformer_by_hand(model: Any) -> Callable[..., Any]:
    """The first attention of the decoder is computed beside the encoder, of which it needs nothing."""
    program: Any = sys.modules[type(model).__module__]
    ask = functools.partial(rpc.rpc_async, "worker1", program.worker1_process_linear_layer)

    def forward(source: Tensor, target: Tensor) -> Any:
        encoder, decoder = model.encoder, model.decoder
        x = decoder.positional_embedding(decoder.target_embedding(target).transpose(0, 1)).transpose(0, 1)
        mask = program.get_attn_pad_mask(target, target) + program.get_attn_subsequent_mask(target) > 0
        first, *others = decoder.layers
        attention = first.decoder_self_attn
        asked = ask(args=((x, x, x), "ll0"))
        seen = encoder.positional_embedding(encoder.source_embedding(source).transpose(0, 1)).transpose(0, 1)
        padded = program.get_attn_pad_mask(source, source)
        of_encoder, of_decoder, across = [], [], []
        for number, layer in enumerate(encoder.layers):
            seen, weights = layer(seen, padded)
            of_encoder.append(weights)
            if number == 0:
                scores, values = asked.wait()
                of_decoder.append(attention.NoneLinear0inWorker0(scores, mask))
                asked = ask(args=((of_decoder[0], values, x.size(0)), "ll1"))
        x = attention.layer_norm(x + asked.wait())
        hidden = program.get_attn_pad_mask(target, source)
        x, weights = first.encoder_decoder_attn(x, seen, seen, hidden)
        across.append(weights)
        x = first.ffn(x)
        for layer in others:
            x, own, weights = layer(x, seen, mask, hidden)
            of_decoder.append(own)
            across.append(weights)
        logits = model.projection(x)
        return logits.view(-1, logits.size(-1)), of_encoder, of_decoder, across

    return forward


def films() -> Batch:
    """Users and the films that they rate, and how they do."""
    generator = torch.Generator().manual_seed(0)
    return Batch(
        inputs=(torch.randint(0, 50, (64, 2), generator=generator),), target=torch.rand(64, generator=generator)
    )


def factorization(module: ModuleType) -> nn.Module:
    """Embeddings on one server and the rest on another.

    An expert would issue all micro-batches at once. In torch 2.13 a server that is given RRefs side by side may hang.
    """
    model: nn.Module = module.RPCDeepFactorizationMachineModel(
        in_features=[50, 60],
        devices=["cpu", "cpu"],
        micro_batch_chunks=8,
        worker_ids=["trainer_0", "trainer_1"],
    )
    return model


def experts(module: ModuleType) -> nn.Module:
    """A router over three experts, one to a server."""
    made = [rpc.remote(f"worker{each}", module.RemoteExpert, (784, 64, 10)) for each in (1, 2, 3)]
    model: nn.Module = module.RPCMoE(784, 64, 10, made)
    return model


def digits() -> Batch:
    """Digits in one row of pixels."""
    given = images()
    return Batch(inputs=(given.inputs[0].flatten(1),), target=given.target)


def snapshots(module: ModuleType) -> nn.Module:
    """Three workers with three snapshots of a graph each, below a recurrent layer."""
    workers = [rpc.remote(f"worker{each}", module.RRefWrapper, (each, 8)) for each in range(3)]
    for worker in workers:
        worker.rpc_sync().load_fake()
    model: nn.Module = module.Euler(workers)
    return model


def shards(module: ModuleType) -> nn.Module:
    """Attention in two heads, and a layer in two, one of each to a server."""
    model: nn.Module = module.DistAttention(2, 32, 32, ["worker1", "worker2"], 0.1, 16, 32, 0.1)
    return model


def shards_on_processors() -> None:
    """Let the shards of the attention be where there is no accelerator."""
    program: Any = sys.modules["program_dist_attention"]
    for shard in (program.SelfAttentionShard, program.MLPShard):
        made = shard.__init__
        shard.__init__ = lambda self, _, *given, made=made: made(self, "cpu", *given)


def sequences() -> Batch:
    """A few sequences of vectors."""
    return Batch(inputs=(torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(0)),))


def on_processors() -> None:
    """Let the layers of LeNet be where there is no accelerator."""
    program: Any = sys.modules["program_lenet"]
    program.d0 = program.d1 = program.d2 = "cpu"


def on_servers_processors() -> None:
    """Let modules be where there is no accelerator."""
    move = nn.Module.to

    def moved(module: nn.Module, *given: Any, **options: Any) -> nn.Module:
        return module if given == ("cuda",) else move(module, *given, **options)

    nn.Module.to = moved  # type: ignore[method-assign, assignment]


_READS: Final = frozenset({"parameters"})


def _tables(server: int) -> Callable[..., Any]:
    def returns(offsets: list[Tensor], _: list[Tensor]) -> Any:
        found = [torch.empty(offsets[0].shape[0], 64) for _ in range(2)]
        return found, [fxlib.Exactly(2 * server), fxlib.Exactly(2 * server + 1)]

    return returns


_TABLES: Final = {f"emb_rref_{each}.forward": fxlib.Contract(reads=_READS, returns=_tables(each)) for each in range(4)}
"""Which tables each server has: it answers with their numbers, and the forward puts them into their places by these."""

_HYBRID: Final = Program(
    name="ddp_rpc",
    path="ddp_rpc/main.py",
    holds="class HybridModel",
    servers=("ps",),
    make=remote_table,
    batch=bags,
    parallel=True,
)

_DLRM: Final = Program(
    name="dlrm",
    path="dlrm_rpc.py",
    holds="emb_rref.rpc_sync().forward",
    servers=("ps0", "ps1", "ps2", "ps3"),
    make=recommender,
    batch=clicks,
    contracts=_TABLES,
    hand=recommender_by_hand,
    parallel=True,
)

PROGRAMS: Final = (
    Program(
        name="HybridModel",
        path="distributed/benchmarks/benchmark_ddp_rpc.py",
        holds="class HybridModel",
        servers=("ps0", "ps1", "ps2", "ps3"),
        make=hybrid,
        batch=bags,
        hand=hybrid_by_hand,
        parallel=True,
    ),
    Program(
        name="parameter_server",
        path="parameter_server/rpc_parameter_server.py",
        holds="class TrainerNet",
        servers=("parameter_server",),
        make=lambda module: module.TrainerNet(),
        batch=images,
        is_random=True,
    ),
    Program(
        name="rnn",
        path="rnn/rnn.py",
        holds="class RNNModel",
        servers=("ps",),
        make=lambda module: module.RNNModel("ps", 10, 200, 200, 2),
        batch=words,
        is_random=True,
    ),
    _HYBRID,
    replace(_HYBRID, name="rpc_ddp_tutorial", path="rpc_ddp_tutorial/main.py"),
    Program(
        name="ddp_under_dist_autograd",
        path=f"{_TESTED.replace('.', '/')}.py",
        holds="class HybridModel",
        servers=("ps0", "ps1"),
        make=tested,
        batch=features,
        contracts={
            f"{_TESTED}:RemoteEM.forward": fxlib.Contract(
                reads=_READS, returns=lambda rows: torch.empty(rows.shape[0], 3)
            ),
            f"{_TESTED}:RemoteNet.forward": fxlib.Contract(reads=_READS, returns=lambda x: torch.empty(x.shape[0], 3)),
        },
    ),
    _DLRM,
    replace(_DLRM, name="dlrm_async", holds="emb_rref.rpc_async().forward", hand=None),
    Program(
        name="bert",
        path="sst2_rpc/model.py",
        holds="class DistBertOri",
        servers=("cloud", "edge"),
        make=halves,
        batch=sentences,
        is_random=True,
        prepare=layers_of_transformers_4,
    ),
    Program(
        name="gpt",
        path=".py",
        holds="class RPCPipeline",
        servers=("ps0", "ps1"),
        make=stages,
        batch=tokens,
    ),
    Program(
        name="transformer",
        path=".py",
        holds="worker1_process_linear_layer, args=((input_Q",
        servers=("worker1",),
        make=lambda module: module.Transformer(6, 9, 32, 2, 4, 64, 8, 8),
        batch=sentence_pairs,
        contracts={"program_transformer:worker1_process_linear_layer": fxlib.Contract(reads=frozenset({"layers"}))},
        hand=transformer_by_hand,
        prepare=layers_of_a_transformer,
    ),
    Program(
        name="lenet",
        path=".py",
        holds="class ParallelNet",
        servers=("worker1", "worker2"),
        make=lambda module: module.ParallelNet(),
        batch=images,
        prepare=on_processors,
    ),
    Program(
        name="deepfm",
        path="chapter_9/rpc_torch_pipeline_deepfm.py",
        holds="class RPCDeepFactorizationMachineModel",
        servers=("trainer_0", "trainer_1"),
        make=factorization,
        batch=films,
        contracts={".forward": fxlib.Contract(reads=_READS)},
    ),
    Program(
        name="rpc_centralized",
        path="chapter_7/rpc_centralized.py",
        holds="class ParameterServer",
        servers=("parameter_server",),
        make=lambda module: module.Worker(sync=True),
        batch=images,
    ),
    Program(
        name="stages",
        path=".py",
        holds="class DistMNIST",
        servers=("worker1", "worker2", "worker3"),
        make=lambda module: module.DistMNIST([f"worker{each}/cpu" for each in (1, 2, 3)], module.shards, 8),
        batch=digits,
    ),
    Program(
        name="split_learning",
        path="7-split-learning/model.py",
        holds="class SplitModel",
        servers=("worker1",),
        make=lambda module: module.SplitModel("worker1"),
        batch=images,
        prepare=on_servers_processors,
    ),
    Program(
        name="experts",
        path="moe_rpc_fashionmnist.py",
        holds="class RPCMoE",
        servers=("worker1", "worker2", "worker3"),
        make=experts,
        batch=images,
    ),
    Program(
        name="euler",
        path=".py",
        holds="class EulerGNN",
        servers=("worker0", "worker1", "worker2"),
        make=snapshots,
        batch=lambda: Batch(inputs=()),
        contracts={".forward": fxlib.Contract(reads=_READS, returns=lambda **_: torch.empty(3, 20, 64))},
    ),
    Program(
        name="dist_attention",
        path=".py",
        holds="class DistAttention",
        servers=("worker1", "worker2"),
        make=shards,
        batch=sequences,
        prepare=shards_on_processors,
    ),
    Program(
        name="batch",
        path="batch/parameter_server.py",
        holds="class BatchUpdateParameterServer",
        servers=("ps",),
        make=lambda module: module.Trainer(rpc.remote("ps", module.BatchUpdateParameterServer)),
        batch=images,
    ),
)


def named(name: str) -> Program:
    """Return the program of this name."""
    return next(each for each in PROGRAMS if each.name == name)
