"""Objects of the program's own as arguments, such as key-value caches: refused, and the way out of that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxlib
from fxlib.errors import CaptureError

Past = list[tuple[torch.Tensor, torch.Tensor]]


class Step(nn.Module):
    """One step of a decoder, whose cache comes and goes as tensors."""

    def __init__(self, decoder: nn.Module, cache: type[Any]) -> None:
        super().__init__()
        self.decoder, self.cache = decoder, cache

    def forward(self, ids: torch.Tensor, past: Past) -> tuple[torch.Tensor, Past]:
        cache = self.cache()
        for layer, (keys, values) in enumerate(past):
            cache.update(keys, values, layer)
        return self.decoder(ids, past_key_values=cache).logits, parts(cache)


def parts(cache: Any) -> Past:
    return [(each.keys, each.values) for each in cache.layers]


@pytest.fixture(name="dynamic_cache")
def import_dynamic_cache() -> type[Any]:
    from transformers.cache_utils import DynamicCache  # here, since whoever collects the tests would import it, too

    return DynamicCache


@pytest.fixture(name="decoder")
def make_decoder() -> nn.Module:
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM
    from transformers.models.llama.configuration_llama import LlamaConfig

    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
    )
    decoder: nn.Module = AutoModelForCausalLM.from_config(config)
    return decoder.eval()


@pytest.mark.slow
def test_a_cache_as_an_argument_is_refused_with_the_way_out(decoder: nn.Module, dynamic_cache: type[Any]) -> None:
    cache = dynamic_cache()
    with torch.no_grad():
        decoder(torch.ones(1, 5, dtype=torch.int64), past_key_values=cache)
        given = {"input_ids": torch.ones(1, 1, dtype=torch.int64), "past_key_values": cache}
        with pytest.raises(CaptureError, match=r"an argument is a DynamicCache.* takes the object's tensors"):
            fxlib.capture(decoder, how="export", sample_inputs=given)


@pytest.mark.slow
def test_a_decoders_step_with_its_cache_as_tensors_is_one_graph_bit_for_bit(
    decoder: nn.Module, dynamic_cache: type[Any]
) -> None:
    step, ids = Step(decoder, dynamic_cache).eval(), torch.ones(1, 1, dtype=torch.int64)
    cache = dynamic_cache()
    length = {2: torch.export.Dim("length", min=2, max=256)}
    with torch.no_grad():
        decoder(torch.arange(5)[None], past_key_values=cache)
        sizes = {"ids": None, "past": [(length, length)] * 2}
        module = fxlib.capture(step, sample_inputs=[ids, parts(cache)], dynamic_shapes=sizes)
        ours = theirs = parts(cache)
        for token in range(4):
            one, ours = module(ids + token, ours)
            other, theirs = step(ids + token, theirs)
            assert torch.equal(one, other)
    assert ours[1][0].shape[2] == 9
    assert not fxlib.usage(module).original
