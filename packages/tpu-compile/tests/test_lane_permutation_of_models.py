"""Rotary embeddings of unmodified models, compiled as for a TPU."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import transformers

from tpu_core.lowering.implementations import Target

SIZES: dict[str, Any] = {
    **{"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "max_position_embeddings": 64},
    **{"attn_implementation": "eager", "use_cache": False},
}
MODELS = {
    "halves": lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
    "neighbours": lambda: transformers.CohereConfig(**SIZES, num_key_value_heads=2),
    "half of a part of the head": lambda: transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Compiled as for a TPU, and computed on the CPU."""
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(MODELS[name]()).train(False)
    on_device = copy.deepcopy(model).to("tpu")
    ids = torch.randint(60, (2, 7))
    compiled = torch.compile(on_device, fullgraph=True)
    with Target("tpu").applied(), caplog.at_level(logging.INFO, "tpu_compile"):
        got = compiled(ids.to("tpu")).last_hidden_state
        got.square().sum().backward()
        torch.tpu.synchronize()
        result = got.detach().cpu()
    # Forward and backward; torch 2.11 compiles backward outside of the block.
    passes = 2 if torch.__version__ >= "2.13" else 1
    assert caplog.text.count("made of shifted rows") == passes
    want = model(ids).last_hidden_state
    want.square().sum().backward()
    torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-4)
    for p, q in zip(model.parameters(), on_device.parameters(), strict=True):
        if p.grad is not None:
            assert q.grad is not None
            torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-3, atol=1e-3)
