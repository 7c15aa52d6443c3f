"""Storages: copies, files, bytes that wait for a type, resizing, and addresses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from storage_tools import arange, nothing_new, saved
from tpu_core import modes


def test_deepcopy_has_memory_of_its_own():
    x = arange(2, 3)
    y = copy.deepcopy(x)
    assert y.data_ptr() != x.data_ptr()
    y.add_(10)
    x.mul_(2)
    assert x.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert y.tolist() == [[10, 11, 12], [13, 14, 15]]


def test_deepcopy_keeps_what_shares_a_storage_together():
    base = arange(2, 3)
    copies = copy.deepcopy({"base": base, "row": base[1], "t": base.t()})
    copies["row"].zero_()
    assert copies["base"].tolist() == [[0, 1, 2], [0, 0, 0]]
    assert copies["t"].tolist() == [[0, 0], [1, 0], [2, 0]]
    assert copies["t"].stride() == (1, 3) and copies["row"].storage_offset() == 3
    assert base[1].tolist() == [3, 4, 5]


def test_deepcopied_module_runs_the_programs_of_the_original():
    layer = nn.Linear(3, 2).to("tpu")
    x = arange(4, 3)
    with modes.using(modes.STRICT):
        expected = layer(x)
        twin = copy.deepcopy(layer)
        nothing_new(lambda: twin(x))
        assert torch.equal(twin(x).cpu(), expected.cpu())


def test_clone_is_written_without_touching_the_original():
    x = arange(4)
    y = x.clone()
    x[0] = 7
    assert (x.tolist(), y.tolist()) == ([7, 1, 2, 3], [0, 1, 2, 3])


@pytest.mark.parametrize("target", ["cpu", "tpu", None])
@pytest.mark.parametrize("source", ["cpu", "tpu"])
def test_saved_views_come_back_as_views_of_one_storage(source: str, target: str | None):
    base = arange(3, 4).to(source)
    held = {"base": base, "row": base[1], "t": base.t(), "step": base[:, ::2]}
    loaded = torch.load(saved(held), map_location=target)
    device = target or source
    for name, t in held.items():
        assert loaded[name].device.type == device
        assert torch.equal(loaded[name].cpu(), t.cpu())
        assert loaded[name].stride() == t.stride()
    loaded["base"][1, 0] = -1
    assert loaded["row"][0].item() == loaded["t"][0, 1].item() == loaded["step"][1, 0].item() == -1


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3.5),
        lambda: torch.empty(0, 3),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.tensor([1, 0, 1], dtype=torch.bool),
        lambda: torch.tensor([1.5, -2], dtype=torch.bfloat16),
        lambda: torch.tensor([1 + 2j, 3], dtype=torch.complex64),
        lambda: torch.tensor([2**40, -1]),
        lambda: torch.arange(5, dtype=torch.uint8),
    ],
)
def test_files_go_both_ways(make: Callable[[], torch.Tensor]):
    x = make()
    to_device = torch.load(saved(x), map_location="tpu")
    assert to_device.device.type == "tpu"
    back = torch.load(saved(to_device), map_location="cpu")
    assert (back.dtype, back.shape, back.stride()) == (x.dtype, x.shape, x.stride())
    assert torch.equal(back, x)
    again = torch.load(saved(to_device))
    assert again.device.type == "tpu" and torch.equal(again.cpu(), x)


def test_loaded_module_runs_the_programs_of_a_fresh_one():
    with modes.using(modes.STRICT):
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to("tpu")
        optimizer = torch.optim.Adam(model.parameters())
        x = arange(4, 3)

        def step(m: nn.Module, o: torch.optim.Optimizer) -> None:
            o.zero_grad()
            m(x).sum().backward()
            o.step()

        for _ in range(3):
            step(model, optimizer)
        files = saved(model), saved(optimizer.state_dict())
        resumed = torch.load(files[0], weights_only=False)
        other = torch.optim.Adam(resumed.parameters())
        other.load_state_dict(torch.load(files[1]))
        nothing_new(lambda: step(resumed, other))
        step(model, optimizer)
        for a, b in zip(model.parameters(), resumed.parameters()):
            assert torch.equal(a.cpu(), b.cpu())


def test_bytes_take_their_type_at_the_first_use():
    host = torch.arange(6.0)
    # As torch.load does it: the bytes first, the tensor on them afterwards.
    storage = host.untyped_storage().to(device="tpu")
    x = torch.empty(0, device="tpu").set_(storage, 0, (2, 3), (3, 1))
    with modes.using(modes.STRICT):
        arange(2, 3) + 1
        nothing_new(lambda: x + 1)
        assert (x + 1).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_storage_of_odd_length_holds_whole_elements():
    storage = torch.UntypedStorage(10, device="tpu")
    x = torch.empty(0, device="tpu").set_(storage, 0, (2,), (1,))
    x.fill_(1.5)
    assert (x + x).tolist() == [3, 3]


def test_tensor_as_bytes_and_back():
    x = arange(4)
    raw = x.view(torch.uint8)
    assert raw.shape == (16,)
    assert raw.cpu().tolist() == torch.arange(4.0).view(torch.uint8).tolist()
    raw[4:8] = raw[12:16]
    assert x.tolist() == [0, 3, 2, 3]
    assert raw.view(torch.float32).data_ptr() == x.data_ptr()
    x.add_(1)
    assert raw.view(torch.float32).tolist() == [1, 4, 3, 4]


def test_bytes_of_a_bool_storage():
    flags = torch.tensor([True, False, True], device="tpu")
    flags.view(torch.uint8)[1] = 1
    assert flags.tolist() == [True, True, True]


def test_storage_emptied_and_restored_keeps_its_tensors():
    weight = arange(4, 8)
    storage, other = weight.untyped_storage(), weight.view(32)
    nbytes = storage.nbytes()
    torch.tpu.synchronize()
    before = torch.tpu.memory_allocated()
    storage.resize_(0)
    assert (storage.nbytes(), storage.data_ptr()) == (0, 0)
    assert torch.tpu.memory_allocated() == before - nbytes
    assert weight.shape == (4, 8)
    storage.resize_(nbytes)
    weight.copy_(torch.full((4, 8), 2.0))
    assert other.sum().item() == 64
    assert weight.data_ptr() == other.data_ptr() != 0


def test_restored_storage_gives_the_same_programs():
    weight, x = arange(3, 3), arange(2, 3)
    with modes.using(modes.STRICT):
        x @ weight

        def gather() -> None:
            weight.untyped_storage().resize_(0)
            weight.untyped_storage().resize_(36)
            weight.copy_(torch.eye(3))
            x @ weight

        nothing_new(gather)
        assert torch.equal((x @ weight).cpu(), x.cpu())


def test_growing_storage_keeps_its_contents():
    x = arange(3)
    row = x[1:]
    x.resize_(2, 4)
    x.view(8)[3:] = 9
    assert x.tolist() == [[0, 1, 2, 9], [9, 9, 9, 9]]
    assert row.tolist() == [1, 2]


def test_shrunk_storage_takes_bytes():
    x = arange(6)
    x.untyped_storage().resize_(12)
    x.set_(x.untyped_storage(), 0, (3,), (1,))
    assert x.tolist() == [0, 1, 2]
    x.untyped_storage().copy_(torch.tensor([5.0, 6.0, 7.0]).untyped_storage())
    assert x.tolist() == [5, 6, 7]


class Tied(nn.Module):
    """An output projection that is the embedding, as language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


@pytest.mark.parametrize("move", [lambda m: m.to("tpu"), lambda m: m.to("tpu", torch.float32)])
def test_tied_weights_and_optimizers_survive_the_move(move: Callable[[nn.Module], nn.Module]):
    torch.manual_seed(0)
    model = Tied()
    reference = copy.deepcopy(model)
    parameter = model.embedding.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    move(model)
    assert model.head.weight is model.embedding.weight is parameter
    assert optimizer.param_groups[0]["params"][0] is parameter
    assert parameter.device.type == "tpu"
    assert len(list(model.parameters())) == 1

    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    for m, o, device in ((model, optimizer, "tpu"), (reference, other, "cpu")):
        m(torch.tensor([[0, 3, 4]], device=device)).square().sum().backward()
        o.step()
    torch.testing.assert_close(model.head.weight.cpu(), reference.head.weight)


def test_tied_weights_survive_the_move_back():
    model = Tied().to("tpu").to("cpu")
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.device.type == "cpu"


def test_storages_have_addresses_of_their_own_that_do_not_overlap():
    sizes = [1, 3, 128, 129, 1000, 4096, 100_000] * 3
    tensors = [torch.empty(n, device="tpu") for n in sizes]
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:]))
    assert all(t.data_ptr() % 256 == 0 for t in tensors)


def test_address_of_a_view_is_that_of_its_first_element():
    x = arange(3, 4)
    assert x[1, 2:].data_ptr() == x.data_ptr() + 6 * 4
    assert x.t().data_ptr() == x.detach().data_ptr() == x.data_ptr()
    assert x.t().untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert x.clone().data_ptr() != x.data_ptr()


def test_empty_tensors_have_no_address():
    assert torch.empty(0, 3, device="tpu").data_ptr() == 0
