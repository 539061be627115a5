"""Models that nobody here wrote: architectures of pytorchcv and transformers, with weights drawn from a seed.

`models()` names them, `build(name)` makes one. Nothing is downloaded. Statistics and affine weights of normalizations
are drawn, too: fresh ones are zeros and ones, and forgive a wrong fold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How to make one model, and inputs for it."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    heavy: bool = False
    """Whether a test of it takes seconds."""
    small: Architecture | None = None
    """The same for pictures of a third of the width, or with fewer channels, where there is so much to save."""


def models(*, family: str = "", heavy: bool = True) -> list[str]:
    """Return the names: of one family ("convolutional" or "transformer") if given, without the heavy ones if asked."""
    return [
        name
        for group, architectures in _FAMILIES.items()
        for name, each in architectures.items()
        if family in ("", group) and (heavy or not each.heavy)
    ]


def build(name: str, *, seed: int = 0, training: bool = False, small: bool = False) -> tuple[nn.Module, Inputs]:
    """Return a model with weights and statistics drawn from the seed, and inputs for it.

    A small one has the same layers, and a tenth of the arithmetic or less.
    """
    architecture = next(each[name] for each in _FAMILIES.values() if name in each)
    architecture = (architecture.small or architecture) if small else architecture
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = architecture.make()
        randomize(module)
        return module.train(training), architecture.inputs()


@torch.no_grad()
def randomize(module: nn.Module) -> None:
    """Draw statistics and affine weights of all normalizations, near enough to the usual for outputs to stay finite."""
    for each in module.modules():
        if isinstance(mean := getattr(each, "running_mean", None), Tensor):
            mean.uniform_(-0.3, 0.3)
            each.running_var.uniform_(0.5, 1.5)  # type: ignore[operator]
        if "Norm" in type(each).__name__ and isinstance(getattr(each, "weight", None), Tensor):
            each.weight.uniform_(0.6, 1.4)  # type: ignore[operator]
            if isinstance(bias := getattr(each, "bias", None), Tensor):
                bias.uniform_(-0.2, 0.2)


def _image(size: int) -> Callable[[], Inputs]:
    return lambda: (torch.randn(2, 3, size, size),)


def _convolutional(
    name: str, size: int = 224, *, small: tuple[int, int] | None = (64, 2), heavy: bool = True, **narrow: float
) -> Architecture:
    """Return a net for pictures of a size; `small` is a smaller one, and what its last pooling is left with then.

    With `narrow`, the small one is made with these options.
    """

    def make(**options: float) -> nn.Module:
        from pytorchcv.model_provider import get_model

        return get_model(name, num_classes=10, **options)

    def make_small(last: int) -> nn.Module:
        module = make(**narrow)
        for each in module.modules():
            if isinstance(each, nn.AvgPool2d) and each.stride == 1 and each.kernel_size in (7, 8, 10, 13):
                each.kernel_size = last
        return module

    fewer = None
    if small is not None:
        fewer = Architecture(make=partial(make_small, small[1]), inputs=_image(small[0]), heavy=heavy)
    return Architecture(make=make, inputs=_image(size), heavy=heavy, small=fewer)


def _narrow_vgg() -> nn.Module:
    """Make VGG-11 with an eighth of its channels, and dense layers that are narrower yet: they have most weights."""
    from pytorchcv.models.vgg import VGG

    module = VGG([[8], [16], [32, 32], [64, 64], [64, 16]], use_bn=True, num_classes=10)
    module.output.fc1.fc, module.output.fc2.fc = nn.Linear(16 * 7 * 7, 32), nn.Linear(32, 32)
    module.output.fc3 = nn.Linear(32, 10)
    return module


_CONVOLUTIONAL = {
    name: _convolutional(name)
    for name in (
        *("resnet10", "preresnet10", "seresnet10", "resnext14_16x4d", "dla34", "dpn68", "fishnet99"),
        *("densenet121", "peleenet", "condensenet74_c4_g4", "hrnet_w18_small_v1", "bninception", "diracnet18v2"),
        *("mobilenetv2_wd4", "efficientnet_b0", "mnasnet_small", "ghostnet", "igcv3_wd4", "menet108_8x1_g3"),
        *("shufflenetv2_wd2", "nasnet_4a1056"),
    )
} | {
    "bn_vgg11": replace(
        _convolutional("bn_vgg11"), small=Architecture(make=_narrow_vgg, inputs=_image(224), heavy=True)
    ),
    "resnet50": _convolutional("resnet50", width_scale=0.25),
    "inceptionv3": _convolutional("inceptionv3", 299, small=(107, 2)),
    "xception": _convolutional("xception", 299, small=(107, 4)),
    "mobilenet_wd4": _convolutional("mobilenet_wd4"),
    "squeezenet_v1_1": _convolutional("squeezenet_v1_1", small=(64, 3)),
    "shufflenet_g1_wd4": _convolutional("shufflenet_g1_wd4"),
    "resnet20_cifar10": _convolutional("resnet20_cifar10", 32, small=None, heavy=False),
    "densenet40_k12_cifar10": _convolutional("densenet40_k12_cifar10", 32, small=None),
}

_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_PAIR = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "decoder_start_token_id": 2,
}  # fmt: skip
_PICTURE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


def _tokens(length: int = 12) -> Tensor:
    return torch.randint(3, 64, (2, length))


def _text() -> Inputs:
    return (_tokens(),)


def _masked_text() -> Inputs:
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 9:] = 0
    return _tokens(), mask


def _text_pair() -> Inputs:
    return *_masked_text(), _tokens(7)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transformer:
    """A class of transformers, and the options of its configuration."""

    model: str
    config: str
    options: Mapping[str, Any] = field(default_factory=lambda: _SMALL)
    inputs: Callable[[], Inputs] = _masked_text

    def make(self) -> nn.Module:
        import transformers

        config = getattr(transformers, self.config)(**self.options)
        return getattr(transformers, self.model)(config)


_SPECS = {
    "bert": _Transformer(model="BertModel", config="BertConfig"),
    "roberta": _Transformer(model="RobertaForMaskedLM", config="RobertaConfig"),
    "electra": _Transformer(model="ElectraModel", config="ElectraConfig", options=_SMALL | {"embedding_size": 16}),
    "albert": _Transformer(model="AlbertModel", config="AlbertConfig", options=_SMALL | {"embedding_size": 16}),
    "distilbert": _Transformer(
        model="DistilBertModel",
        config="DistilBertConfig",
        options={"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4,
                 "max_position_embeddings": 32},
    ),
    "gpt2": _Transformer(
        model="GPT2LMHeadModel",
        config="GPT2Config",
        options={"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32,
                 "bos_token_id": 1, "eos_token_id": 2},
        inputs=_text,
    ),
    "gpt_neox": _Transformer(model="GPTNeoXForCausalLM", config="GPTNeoXConfig", inputs=_text),
    "opt": _Transformer(
        model="OPTForCausalLM",
        config="OPTConfig",
        options=_SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    "llama": _Transformer(
        model="LlamaForCausalLM", config="LlamaConfig", options=_SMALL | {"num_key_value_heads": 2}, inputs=_text
    ),
    "mistral": _Transformer(
        model="MistralForCausalLM", config="MistralConfig", options=_SMALL | {"num_key_value_heads": 2}, inputs=_text
    ),
    "qwen2": _Transformer(
        model="Qwen2ForCausalLM", config="Qwen2Config", options=_SMALL | {"num_key_value_heads": 2}, inputs=_text
    ),
    "t5": _Transformer(
        model="T5Model",
        config="T5Config",
        options={"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
                 "decoder_start_token_id": 0},
        inputs=_text_pair,
    ),
    "bart": _Transformer(model="BartModel", config="BartConfig", options=_PAIR, inputs=_text_pair),
    "whisper_encoder": _Transformer(
        model="WhisperForAudioClassification",
        config="WhisperConfig",
        options=_PAIR | {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 16},
        inputs=lambda: (torch.randn(2, 16, 40),),
    ),
    "vit": _Transformer(
        model="ViTForImageClassification", config="ViTConfig", options=_PICTURE, inputs=_image(32)
    ),
    "deit": _Transformer(model="DeiTModel", config="DeiTConfig", options=_PICTURE, inputs=_image(32)),
    "convnext": _Transformer(
        model="ConvNextForImageClassification",
        config="ConvNextConfig",
        options={"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 2, 1]},
        inputs=_image(64),
    ),
    "wav2vec2": _Transformer(
        model="Wav2Vec2Model",
        config="Wav2Vec2Config",
        options=_SMALL | {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3],
                          "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
                          "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0},
        inputs=lambda: (torch.randn(2, 400),),
    ),
}  # fmt: skip

_TRANSFORMERS = {
    name: Architecture(make=each.make, inputs=each.inputs, heavy=name != "bert") for name, each in _SPECS.items()
}
_FAMILIES = {"convolutional": _CONVOLUTIONAL, "transformer": _TRANSFORMERS}
