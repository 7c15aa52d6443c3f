"""transformers' Trainer on accelerate, peft and diffusers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

VOCABULARY = 64


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": VOCABULARY}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def trainer(device: str) -> Iterator[tuple[str, Tensor]]:
    """Training with evaluation, checkpoints and a resume; the variable names the device."""
    from transformers import Trainer, TrainingArguments, set_seed

    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCABULARY, (24, 10), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in rows]
    options: list[dict[str, Any]] = [
        {},
        {"optim": "adafactor", "lr_scheduler_type": "cosine", "gradient_accumulation_steps": 2},
        {"optim": "adamw_torch_fused", "weight_decay": 0.1, "gradient_checkpointing": True},
    ]
    with mock.patch.dict(os.environ, {"ACCELERATE_TORCH_DEVICE": device}):
        for i, own in enumerate(options):
            set_seed(0)
            with tempfile.TemporaryDirectory() as folder:
                arguments = TrainingArguments(
                    folder,
                    per_device_train_batch_size=4,
                    num_train_epochs=2,
                    logging_steps=1,
                    save_steps=4,
                    eval_strategy="epoch",
                    report_to=[],
                    disable_tqdm=True,
                    use_cpu=device == "cpu",
                    **own,
                )
                first = Trainer(_llama(), arguments, train_dataset=data, eval_dataset=data[:6])
                assert first.model.device.type == device
                first.train()
                log = first.state.log_history
                yield f"losses {i}", torch.tensor([e["loss"] for e in log if "loss" in e])
                yield (
                    f"evaluation {i}",
                    torch.tensor([e["eval_loss"] for e in log if "eval_loss" in e]),
                )
                again = Trainer(_llama(), arguments, train_dataset=data, eval_dataset=data[:6])
                again.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-4"))
                yield f"resumed {i}", torch.stack([p.norm() for p in again.model.parameters()])


def adapters(device: str) -> Iterator[tuple[str, Tensor]]:
    from peft import IA3Config, LoHaConfig, LoraConfig, get_peft_model

    configs = {
        "LoRA": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        "DoRA": LoraConfig(r=4, use_dora=True, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        "IA3": IA3Config(
            target_modules=["k_proj", "down_proj"],
            feedforward_modules=["down_proj"],
            task_type="CAUSAL_LM",
        ),
        "LoHa": LoHaConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        model = get_peft_model(_llama(), config).to(device)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer, generator = torch.optim.AdamW(trained, 0.01), torch.Generator().manual_seed(3)
        for step in range(3):
            shape = (2, 6 + step)
            tokens = torch.randint(VOCABULARY, shape, generator=generator).to(device)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield f"{name}, step {step}", loss.detach()
        merged = model.eval().merge_and_unload()
        yield f"{name}, merged", merged(input_ids=tokens).logits.detach()
        made = merged.generate(input_ids=tokens[:, :4], max_new_tokens=5, do_sample=False)
        yield f"{name}, tokens", made


def denoising(device: str) -> Iterator[tuple[str, Tensor]]:
    """A diffusion model with the average of its weights, and five samplers."""
    import diffusers
    from diffusers.training_utils import EMAModel

    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).to(device)
    schedule, average = diffusers.DDPMScheduler(50), EMAModel(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        images, noise = (torch.randn(2, 3, 16, 16, generator=generator) for _ in range(2))
        times = torch.randint(50, (2,), generator=generator)
        images, noise, times = images.to(device), noise.to(device), times.to(device)
        loss = F.mse_loss(model(schedule.add_noise(images, noise, times), times).sample, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        yield f"step {step}", loss.detach()
    names = ("DDIM", "EulerDiscrete", "DPMSolverMultistep", "PNDM", "HeunDiscrete")
    start = torch.randn(1, 3, 16, 16, generator=generator).to(device)
    for name in names:
        sampler = getattr(diffusers, f"{name}Scheduler")(50)
        sampler.set_timesteps(4, device=device)
        images = start * sampler.init_noise_sigma
        for time in sampler.timesteps:
            with torch.no_grad():
                noise = model(sampler.scale_model_input(images, time), time).sample
            images = sampler.step(noise, time, images).prev_sample
        yield name, images
