"""Rows S: saving, loading and copying."""

from __future__ import annotations

import copy
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from .process import run_python


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


class Tied(nn.Module):
    """An output projection that is the embedding, as language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def check_save() -> None:
    base = torch.arange(12.0, device="tpu").reshape(3, 4)
    loaded = torch.load(saved({"base": base, "row": base[1], "t": base.t()}), map_location="cpu")
    assert torch.equal(loaded["base"], base.cpu())
    assert loaded["t"].stride() == (1, 4)
    loaded["base"][1, 0] = -1
    assert loaded["row"][0] == loaded["t"][0, 1] == -1

    for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        x = torch.tensor([0, 1, 2], device="tpu").to(dtype)
        assert torch.equal(torch.load(saved(x), map_location="cpu"), x.cpu())

    model = nn.Linear(2, 2).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2, device="tpu")).sum().backward()
    optimizer.step()
    state = torch.load(saved(optimizer.state_dict()))
    assert torch.equal(
        state["state"][0]["exp_avg"].cpu(), optimizer.state[model.weight]["exp_avg"].cpu()
    )
    whole = torch.load(saved(model), weights_only=False)
    assert isinstance(whole.weight, nn.Parameter)
    assert torch.equal(whole.weight.cpu(), model.weight.cpu())

    data = safetensors.torch.save({"weight": model.weight.detach(), "t": base.t().contiguous()})
    tensors = safetensors.torch.load(data)
    assert torch.equal(tensors["weight"], model.weight.detach().cpu())
    assert torch.equal(tensors["t"].to("tpu").cpu(), base.t().cpu())


def check_load() -> None:
    x = torch.arange(6.0)
    for location in ("tpu", "tpu:0", torch.device("tpu"), {"cpu": "tpu:0"}):
        loaded = torch.load(saved(x), map_location=location)
        assert loaded.device == torch.device("tpu", 0), location
        assert torch.equal(loaded.cpu(), x)
        loaded += 1
        assert torch.equal(loaded.cpu(), x + 1)
    on_device = x.to("tpu")
    for location in ("cpu", torch.device("cpu"), lambda storage, _: storage.cpu()):
        loaded = torch.load(saved(on_device), map_location=location)
        assert loaded.device.type == "cpu"
        assert torch.equal(loaded, x)
    assert torch.load(saved(on_device)).device == torch.device("tpu", 0)
    views = torch.load(saved([on_device, on_device[2:]]), map_location="tpu")
    views[1].fill_(7)
    assert views[0].tolist() == [0, 1, 7, 7, 7, 7]
    run_python(
        """
        import io, torch
        file = io.BytesIO()
        torch.save(torch.arange(3.0, device="tpu:1"), file)
        for location, index in ((None, 1), ("tpu:0", 0), ("tpu:1", 1), ({"tpu:1": "tpu:0"}, 0)):
            file.seek(0)
            x = torch.load(file, map_location=location)
            assert x.device.index == index and x.tolist() == [0, 1, 2], (location, x.device)
        """,
        TPU_PLATFORM="cpu",
        TPU_NUM_DEVICES="2",
    )


def check_load_without_backend(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    model = Tied().to("tpu")
    torch.save({"state": model.state_dict(), "x": torch.arange(4.0, device="tpu")[1:]}, path)
    with zipfile.ZipFile(path) as archive:
        names = [n for n in archive.namelist() if n.endswith("data.pkl")]
        assert b"tpu_core" not in archive.read(names[0])
    run_python(
        f"""
        import sys, torch
        loaded = torch.load({str(path)!r}, map_location="cpu")
        assert not hasattr(torch, "tpu") and "tpu_core" not in sys.modules
        assert loaded["x"].tolist() == [1, 2, 3]
        assert loaded["state"]["embedding.weight"].shape == (5, 3)
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def check_deepcopy() -> None:
    x = torch.arange(4.0, device="tpu", requires_grad=True)
    (x * x).sum().backward()
    y = copy.deepcopy(x)
    assert torch.equal(y.detach().cpu(), x.detach().cpu())
    assert torch.equal(y.grad.cpu(), x.grad.cpu())
    with torch.no_grad():
        y.fill_(-1)
    assert x.tolist() == [0, 1, 2, 3]
    pair = copy.deepcopy([x.detach(), x.detach()[1:]])
    pair[1].zero_()
    assert pair[0].tolist() == [0, 0, 0, 0]
    assert pickle.loads(pickle.dumps(x.detach())).tolist() == [0, 1, 2, 3]

    model = Tied()
    weight = model.embedding.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.to("tpu")
    # As on CUDA: a parameter is the same object after the move, tied or in an optimizer.
    assert model.embedding.weight is weight is model.head.weight
    assert optimizer.param_groups[0]["params"][0] is weight
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embedding.weight is not weight
    assert twin.head.weight.is_tpu
    model.to("cpu")
    assert model.embedding.weight is weight is model.head.weight
