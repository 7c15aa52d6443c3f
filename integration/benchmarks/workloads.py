"""The workloads in PyTorch, each as an ordinary user writes it, on any device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # models

import jobs
import numpy as np
import torch
import torch.nn as nn
from jobs import Job

from models import gpt, image_nets, mlp, resnet

Data = dict[str, torch.Tensor]


def materials(name: str) -> tuple[nn.Module | None, Data]:
    """Model with its initial weights and the data of a workload, the same at every call."""
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    if name == "mlp":
        x, y = mlp.random_batch(g, 128, jobs.MLP["features"], jobs.MLP["classes"])
        return mlp.MLP(**jobs.MLP), {"x": x, "y": y}
    if name == "small_ops":
        return None, {"x": torch.randn(1024, generator=g)}
    if name == "resnet18":
        x, y = resnet.random_batch(g, 32, 32)
        return resnet.ResNet18(**jobs.RESNET), {"x": x, "y": y}
    if name == "accum":
        size = jobs.BATCHES * jobs.MICRO_BATCHES
        x, y = gpt.random_batch(g, 4 * size, jobs.SMALL_GPT["length"], jobs.SMALL_GPT["vocab"])
        shape = (jobs.BATCHES, jobs.MICRO_BATCHES, 4, -1)
        return gpt.GPT(**jobs.SMALL_GPT), {"x": x.reshape(shape), "y": y.reshape(shape)}
    if name == "gpt":
        x, y = gpt.random_batch(g, 8, jobs.GPT["length"], jobs.GPT["vocab"])
        return gpt.GPT(**jobs.GPT), {"x": x, "y": y}
    if name in ("resnet50", "mobilenet_v2"):
        net = {"resnet50": image_nets.ResNet50, "mobilenet_v2": image_nets.MobileNetV2}[name]()
        return image_nets.as_trained(net, g), {"x": torch.randn(jobs.IMAGES, generator=g)}
    if name == "bert":
        return _bert(g)
    vocab = jobs.GPT["vocab"]
    if name == "rnn_dynamic":
        return gpt.GPT(**jobs.GPT).eval(), {"x": torch.randint(vocab, (1, 256), generator=g)}
    prompt = torch.randint(vocab, (1, jobs.PROMPT), generator=g)
    return gpt.GPT(**jobs.DECODER).eval(), {"x": prompt}


def _bert(g: torch.Generator) -> tuple[nn.Module, Data]:
    """BERT-base as transformers has it; the second text is shorter than the first."""
    import transformers

    size = jobs.BERT
    config = transformers.BertConfig(
        vocab_size=size["vocab"],
        hidden_size=size["dim"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        intermediate_size=4 * size["dim"],
    )
    batch, time = jobs.TEXTS
    mask = (torch.arange(time) < time - time // 4 * torch.arange(batch)[:, None]).long()
    ids = torch.randint(size["vocab"], jobs.TEXTS, generator=g)
    return transformers.BertModel(config).eval(), {"x": ids, "mask": mask}


def export(name: str, file: Path) -> None:
    """Write weights (``w.*``) and data of a workload for its JAX twin."""
    model, data = materials(name)
    arrays = {k: v.numpy() for k, v in data.items()}
    if model is not None:
        # By name, each tied weight once.
        arrays |= {f"w.{k}": v.detach().numpy() for k, v in model.named_parameters()}
        arrays |= {f"b.{k}": v.numpy() for k, v in model.named_buffers() if "running" in k}
    np.savez(file, **arrays)


def build(name: str, device: str, compiled: bool = False) -> Job:
    """The workload on a device; ``compiled``: model, loss and optimizer by `torch.compile`."""
    model, data = materials(name)
    if model is not None:
        model.to(device)
        if compiled and name == "rnn_dynamic":
            model = torch.compile(model, fullgraph=True, dynamic=True)
        elif compiled and name in jobs.INFERENCE:
            model = torch.compile(model, fullgraph=True)
        elif compiled:
            model.loss = torch.compile(model.loss, fullgraph=True)
    if name == "accum":  # its batches are moved when they are used
        return Job(_accumulating(model, data, device))
    data = {k: v.to(device) for k, v in data.items()}
    if name == "small_ops":
        return Job(lambda i: _chain(data["x"]))
    if name in jobs.INFERENCE:
        return Job(lambda i: _inference(model, data))
    if name == "rnn_dynamic":
        return Job(lambda i: _sweep(model, data["x"]))
    if name.startswith("decode"):
        cache = {"decode_static": "index", "decode_growing": "cat"}[name]
        return Job(lambda i: sum(t for (t,) in model.generate(data["x"], jobs.TOKENS, cache)))
    optimizer = _optimizer(name, model)
    if compiled:
        optimizer.step = torch.compile(optimizer.step)
    return Job(_training(model, optimizer, data))


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "mlp":
        return torch.optim.Adam(model.parameters(), lr=jobs.ADAM_RATE)
    if name == "resnet18":
        return torch.optim.SGD(model.parameters(), lr=jobs.SGD_RATE, momentum=jobs.MOMENTUM)
    return torch.optim.AdamW(model.parameters(), lr=jobs.ADAMW_RATE, weight_decay=jobs.WEIGHT_DECAY)


def _training(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Data
) -> Callable[[int], torch.Tensor]:
    def step(i: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model.loss(data["x"], data["y"])
        loss.backward()
        optimizer.step()
        return loss

    return step


def _accumulating(model: nn.Module, data: Data, device: str) -> Callable[[int], object]:
    optimizer = _optimizer("accum", model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, jobs.SCHEDULE_STEPS)

    def step(i: int) -> object:
        optimizer.zero_grad()
        xs, ys = (data[k][i % jobs.BATCHES] for k in ("x", "y"))
        for x, y in zip(xs, ys):
            loss = model.loss(x.to(device), y.to(device)) / jobs.MICRO_BATCHES
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), jobs.LARGEST_NORM)
        optimizer.step()
        schedule.step()
        if i % jobs.LOG_EVERY == 0:
            return loss.item()  # the log
        return loss

    return step


@torch.no_grad()
def _chain(x: torch.Tensor) -> torch.Tensor:
    """200 pointwise ops; the caller reads one number."""
    for _ in range(40):
        x = x * 1.01
        x = x + 0.1
        x = torch.abs(x)
        x = torch.clamp(x, max=3.0)
        x = x - 0.05
    return x[7]


@torch.no_grad()
def _sweep(model: nn.Module, ids: torch.Tensor) -> float:
    return sum(float(model(ids[:, :n]).cpu().abs().mean()) for n in jobs.LENGTHS)


@torch.no_grad()
def _inference(model: nn.Module, data: Data) -> float:
    """What the model answers, read: logits, or the texts' vectors."""
    if "mask" in data:
        result = model(input_ids=data["x"], attention_mask=data["mask"]).pooler_output
    else:
        result = model(data["x"])
    return float(result.cpu().abs().mean())
