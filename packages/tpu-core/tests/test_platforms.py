"""Which platform is chosen, from files and variables alone."""

from __future__ import annotations

import pytest

from tpu_core import config, platforms
from tpu_core.config import override
from tpu_core.errors import TpuNotAvailableError
from tpu_core.pjrt import chips
from tpu_core.platforms import Platform

VM = {"TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_ID": "0"}


@pytest.fixture(autouse=True)
def not_started(monkeypatch):
    """A process whose device has not started."""
    monkeypatch.setattr(config, "_at_start", None)


def make_machine(root, accel=0, vfio=0, pci=(), other_pci=()):
    """A file system with device files and PCI devices as a TPU VM has them."""
    (root / "dev/vfio").mkdir(parents=True)
    (root / "dev/vfio/vfio").touch()
    (root / "dev/accel").mkdir()
    for i in range(accel):
        (root / f"dev/accel{i}").touch()
    for i in range(vfio):
        (root / f"dev/vfio/{i}").touch()
    devices = [("0x1ae0", d) for d in pci] + list(other_pci)
    for i, (vendor, device) in enumerate(devices):
        folder = root / f"sys/bus/pci/devices/0000:00:{i:02}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    return root


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Let `platforms` look at a made-up machine: ``machine(accel=4, libtpu=True)``."""
    for name in ("TPU_CHIPS_PER_HOST_BOUNDS", "TPU_VISIBLE_CHIPS"):
        monkeypatch.delenv(name, raising=False)

    def build(libtpu=True, environ=None, **kwargs):
        root = make_machine(tmp_path / "root", **kwargs)
        library = tmp_path / "libtpu.so"
        if libtpu:
            library.touch()
        environ = {"TPU_LIBRARY_PATH": str(library), **(environ or {})}
        chips = Platform.find_chips(environ, root)
        monkeypatch.setattr(platforms, "_chips", lambda: chips)
        return chips

    return build


def test_nothing_there_is_the_cpu(machine):
    machine(libtpu=False)
    with override(platform=None, num_devices=None, visible_devices=None):
        found = Platform.resolve()
        assert (found.name, found.reason) == ("cpu", "no TPU chip is visible")
        assert platforms.device_count() == 1


def test_chips_without_libtpu_are_the_cpu(machine):
    machine(libtpu=False, accel=4, pci=["0x0063"] * 4)
    with override(platform=None):
        found = Platform.resolve()
    assert found.name == "cpu"
    assert found.reason == "a TPU chip is visible, but libtpu is not installed"


def test_device_files_of_accel_and_libtpu_are_a_tpu(machine):
    chips = machine(accel=4, pci=["0x0063"] * 4)
    assert chips.count == 4
    with override(platform=None, visible_devices=None):
        found = Platform.resolve()
        assert found == Platform("tpu", "4 chips are visible and libtpu is installed", "TPU v5e")
        assert platforms.device_count() == 4


def test_vfio_groups_count_as_far_as_the_bus_shows_tpus(machine):
    network = [("0x1ae0", "0x0042"), ("0x8086", "0x1237")]
    chips = machine(vfio=4, pci=["0x006f"] * 2, other_pci=network)
    assert chips.count == 2
    assert chips.kind == "TPU v6e"


def test_a_cloud_network_card_or_a_foreign_accelerator_is_not_a_chip(machine):
    chips = machine(vfio=2, other_pci=[("0x1ae0", "0x0042"), ("0x1ae0", "0x001f")])
    assert not chips.visible


def test_the_environment_of_a_tpu_vm_counts(machine, monkeypatch):
    assert machine(environ=VM).visible
    with override(platform=None, visible_devices=None):
        assert Platform.resolve().name == "tpu"
        assert platforms.device_count() == 1
        monkeypatch.setenv("TPU_CHIPS_PER_HOST_BOUNDS", "2,4,1")
        assert platforms.device_count() == 8


def test_the_variables_for_ahead_of_time_compilation_do_not_make_a_tpu_vm(machine):
    assert not machine(environ={"TPU_ACCELERATOR_TYPE": "v5litepod-4"}).visible


@pytest.mark.parametrize(("device", "count"), [("0x0027", 8), ("0x005e", 4), ("0x0076", 8)])
def test_chips_with_two_devices(machine, device, count):
    machine(accel=4, pci=[device] * 4)
    with override(platform=None, visible_devices=None):
        assert platforms.device_count() == count


def test_visible_chips_of_libtpu_limit_the_count(machine, monkeypatch):
    machine(accel=4, pci=["0x0063"] * 4)
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "1,2")
    with override(platform=None, visible_devices=None):
        assert platforms.device_count() == 2


def test_a_platform_that_is_named_is_taken(machine):
    machine(accel=4, pci=["0x0063"] * 4)
    with override(platform="cpu", num_devices=8, visible_devices=None):
        assert Platform.resolve() == Platform("cpu", "TPU_PLATFORM=cpu")
        assert platforms.device_count() == 8
    with override(platform="cuda", visible_devices=None):
        assert Platform.resolve().name == "cuda"
        assert platforms.device_count() == 1
    with override(platform="tpu"):
        assert Platform.resolve() == Platform("tpu", "TPU_PLATFORM=tpu", "TPU v5e")


def test_asking_for_a_tpu_that_is_not_there_says_what_was_looked_for(machine):
    machine(libtpu=False)
    with override(platform="tpu"):
        with pytest.raises(TpuNotAvailableError) as raised:
            Platform.resolve()
        assert platforms.device_count() == 0
    message = str(raised.value)
    assert "TPU_PLATFORM=tpu, but no TPU chip is visible." in message
    assert "/dev/accel*, /dev/vfio/*: none" in message
    assert "TPU chips on the PCI bus: none" in message
    assert "libtpu: not found" in message
    assert "unset TPU_PLATFORM" in message


def test_asking_for_a_tpu_names_the_missing_device_files_of_a_container(machine):
    machine(pci=["0x0063"] * 4)
    with override(platform="tpu"), pytest.raises(TpuNotAvailableError, match="--privileged"):
        Platform.resolve()


def test_asking_for_a_tpu_names_the_missing_libtpu(machine):
    machine(libtpu=False, accel=1)
    with override(platform="tpu"):
        with pytest.raises(TpuNotAvailableError, match="but libtpu is not installed"):
            Platform.resolve()


def test_visible_devices_select_and_order():
    with override(platform="cpu", num_devices=4, visible_devices=(2, 0)):
        assert platforms.visible_indices(4) == [2, 0]
        assert platforms.device_count() == 2
    with override(visible_devices=(1, 9, 0)):
        assert platforms.visible_indices(4) == [1]  # an index that does not exist ends the list
    with override(visible_devices=None):
        assert platforms.visible_indices(2) == [0, 1]


def test_this_machine_can_be_looked_at():
    chips = Platform.find_chips()
    assert chips.count >= 0
    assert "libtpu" in chips.describe()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "TPU v4"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("TPU7x", "TPU7x"),
        ("cpu", "cpu"),
    ],
)
def test_names_of_chips_are_those_of_other_projects(kind: str, name: str) -> None:
    assert chips.name_of(kind) == name
