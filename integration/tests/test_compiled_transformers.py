"""Models of Hugging Face's transformers compile whole and compute what they do on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers.generation import CompileConfig

SIZES: dict[str, Any] = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64}
ONE_LAYER: dict[str, Any] = {**SIZES, "num_hidden_layers": 1, "num_attention_heads": 2}
# Random numbers differ between devices.
UNDROPPED: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tokens() -> torch.Tensor:
    return torch.randint(60, (2, 7))


def bert() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.BertConfig(**ONE_LAYER, **UNDROPPED, max_position_embeddings=16)
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    inputs = {"input_ids": tokens(), "attention_mask": mask, "labels": torch.tensor([0, 1])}
    return transformers.BertForSequenceClassification(config), inputs


def gpt2() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    sizes = {"vocab_size": 60, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout))
    model.loss_type = "ForCausalLM"  # without one the model logs a warning, which is a graph break
    x = tokens()
    return model, {"input_ids": x, "labels": x}


def llama() -> tuple[transformers.LlamaForCausalLM, dict[str, torch.Tensor]]:
    config = transformers.LlamaConfig(
        **{**ONE_LAYER, "num_attention_heads": 4}, num_key_value_heads=2, max_position_embeddings=64
    )
    x = tokens()
    return transformers.LlamaForCausalLM(config), {"input_ids": x, "labels": x}


def mixtral() -> tuple[transformers.MixtralForCausalLM, dict[str, torch.Tensor]]:
    """Its experts are grouped products."""
    config = transformers.MixtralConfig(
        **ONE_LAYER, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64
    )
    x = tokens()
    return transformers.MixtralForCausalLM(config), {"input_ids": x, "labels": x}


def t5() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    sizes = {"vocab_size": 60, "d_model": 32, "d_kv": 16, "d_ff": 64}
    config = transformers.T5Config(
        **sizes, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), {
        "input_ids": tokens(),
        "labels": torch.randint(60, (2, 5)),
    }


def vit() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.ViTConfig(**ONE_LAYER, **UNDROPPED, image_size=16, patch_size=8)
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    return transformers.ViTForImageClassification(config), inputs


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("make", [bert, gpt2, llama, mixtral, t5, vit])
def test_inference_and_training_as_on_the_cpu(
    make: Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]],
) -> None:
    host_model, host_inputs = make()
    model = copy.deepcopy(host_model).to("tpu")
    inputs = {k: v.to("tpu") for k, v in host_inputs.items()}
    compiled = torch.compile(model, fullgraph=True)
    fallbacks = torch.tpu.metrics()["fallbacks"]

    with torch.no_grad():
        got, want = compiled.eval()(**inputs), host_model.eval()(**host_inputs)
    torch.testing.assert_close(got.logits.cpu(), want.logits, rtol=1e-4, atol=1e-5)

    for run, given in ((compiled.train(), inputs), (host_model.train(), host_inputs)):
        run(**given).loss.backward()
    for (name, p), q in zip(host_model.named_parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-3, atol=1e-5)
    assert torch.tpu.metrics()["fallbacks"] == fallbacks


@pytest.mark.parametrize("asked_for", [None, CompileConfig(backend="tpu", fullgraph=True)])
def test_generation_with_a_static_cache(asked_for: CompileConfig | None) -> None:
    """`generate` compiles the model itself, for device ``tpu`` by the backend of that name."""
    model, inputs = llama()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(8)  # far from uniform, so that the likeliest token is clear
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    prompt, mask = inputs["input_ids"], torch.ones_like(inputs["input_ids"])
    want = model.generate(prompt, attention_mask=mask, pad_token_id=0, **options)

    model.to("tpu")
    on_device = {"attention_mask": mask.to("tpu"), "compile_config": asked_for}
    compiles = []
    for _ in range(2):
        before = torch.tpu.metrics()["compiles"]
        got = model.generate(prompt.to("tpu"), **on_device, pad_token_id=0, **options)
        assert got.tolist() == want.tolist()
        compiles.append(torch.tpu.metrics()["compiles"] - before)
    assert model._last_compile_config.backend == "tpu"
    stats = torch._dynamo.utils.counters["stats"]
    assert stats["unique_graphs"] == 1, stats
    assert compiles[1] == 0
