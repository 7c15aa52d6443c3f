"""What `import torch` and the first use of the device do where something is missing or wrong."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from interpreter import clean, run
from tpu_core.platforms import Platform

NO_TPU = {"TPU_PLATFORM": "tpu", "TPU_ACCELERATOR_TYPE": "", "TPU_WORKER_ID": ""}


def test_import_is_quiet_and_leaves_jax_alone():
    out = clean("""
        import sys, torch
        assert torch.tpu.is_available() and not torch.tpu.is_initialized()
        torch.manual_seed(0)
        heavy = {"jax", "jaxlib", "libtpu", "tpu_core.config", "tpu_core.metrics",
        "tpu_core.errors"}
        print(sorted(heavy & set(sys.modules)))
    """)
    assert out == "['tpu_core.config', 'tpu_core.errors']\n"  # asked for by is_available


# The error is that of a machine without a TPU.
@pytest.mark.skipif(Platform.find_chips().count > 0, reason="this machine has a TPU")
def test_no_chip_raises_at_first_use_and_prints_nothing():
    out = clean(
        """
        import sys, torch
        from tpu_core.errors import TpuNotAvailableError

        print(torch.tpu.is_available(), torch.tpu.device_count(), torch.accelerator.is_available())
        torch.manual_seed(0)
        torch.tpu.synchronize()
        for use in (
            lambda: torch.ones(2, device="tpu"),
            lambda: torch.ones(2).to("tpu:0"),
            lambda: torch.nn.Linear(2, 2).to("tpu"),
            lambda: torch.tpu.set_device(0),
            lambda: torch.tpu.init(),
            lambda: torch.tpu.get_device_name(),
            lambda: torch.randn(2, device="tpu", generator=torch.Generator("tpu")),
        ):
            try:
                use()
                raise SystemExit("no error")
            except TpuNotAvailableError as error:
                text = str(error)
        assert "jax" not in sys.modules  # so it takes no time
        print(text)
        """,
        **NO_TPU,
    )
    first, *text = out.splitlines()
    assert first == "False 0 False"
    assert text[0] == "[TPU1001] TPU_PLATFORM=tpu, but no TPU chip is visible."
    assert "unset TPU_PLATFORM to run on the CPU" in out


def test_an_invalid_setting_is_reported_at_first_use():
    result = run('import torch; torch.ones(2, device="tpu")', TPU_EAGER_MODE="fussed")
    assert result.returncode == 1
    assert "[TPU1015] TPU_EAGER_MODE='fussed' is not valid." in result.stderr


def rival(folder: Path) -> None:
    """A package ``torch_tpu`` that takes the slot for a device ``tpu``, as such packages do."""
    package = folder / "torch_tpu"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_loader.py").write_text(
        textwrap.dedent("""
            def load():
                import torch, types
                torch.utils.rename_privateuse1_backend("tpu")
                module = types.ModuleType("torch_tpu.device")
                module.is_available = lambda: True
                module._is_in_bad_fork = lambda: False
                module.manual_seed_all = lambda seed: None
                torch._register_device_module("tpu", module)
        """)
    )
    info = folder / "torch_tpu-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-tpu\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_tpu = torch_tpu._loader:load\n")


@pytest.mark.parametrize("order", ["first", "last"])
def test_another_backend_keeps_its_device(order, tmp_path):
    rival(tmp_path)
    # Entry points come in the order of sys.path.
    code = f"""
        import sys
        sys.path.{"insert(0, " if order == "first" else "append("}{str(tmp_path)!r})
        import torch
        assert torch.tpu.__name__ == "torch_tpu.device"
        # Nothing of ours was registered for that device.
        try:
            torch.empty(2, device="tpu")
        except NotImplementedError as error:
            assert "tpu_core" not in str(error) and "csrc/bindings/module.cpp" not in str(error)
        assert "jax" not in sys.modules
        import tpu_core
        try:
            tpu_core.from_jax(1)
        except tpu_core.errors.DeviceSlotTakenError as error:
            print(str(error).splitlines()[0])
    """
    result = run(code)
    assert result.returncode == 0, result.stderr
    why = {
        "first": "another package has registered the device 'tpu' first",
        "last": "torch_tpu is installed, which registers a device 'tpu' of its own",
    }[order]
    assert result.stdout == f"[TPU1003] tpu_core is not active: {why}.\n"
    assert result.stderr.count("DeviceSlotTakenWarning") == 1
    assert f"tpu_core is not active: {why}." in result.stderr


# The module that knows the builds of the extension, before `import torch` asks it.
EXTENSION = """
import importlib.util, pathlib, sys
folder = pathlib.Path(importlib.util.find_spec("tpu_core").origin).parent
spec = importlib.util.spec_from_file_location("tpu_core.cpp_extension", folder / "cpp_extension.py")
sys.modules[spec.name] = extension = importlib.util.module_from_spec(spec)
spec.loader.exec_module(extension)
"""


def test_a_torch_of_another_version_says_what_to_install():
    out = clean(
        EXTENSION
        + textwrap.dedent("""
        extension.CORE.builds = lambda: {"2.9": None, "2.99": None}
        import torch
        from tpu_core.errors import VersionMismatchError

        assert not torch.tpu.is_available() and torch.tpu.device_count() == 0
        assert not hasattr(torch.tpu, "memory_allocated")
        torch.manual_seed(0)
        torch.ones(2).sum()
        torch.device("tpu")
        import tpu_core
        for use in (
            lambda: torch.ones(2, device="tpu"),
            lambda: torch.ones(2).to("tpu"),
            lambda: torch.tpu.memory_allocated(),
            lambda: tpu_core.from_jax(1),
        ):
            try:
                use()
            except VersionMismatchError as error:
                print(error)
    """)
    )
    assert out.count("[TPU1002] tpu_core was built for torch 2.9, 2.99, but torch 2.") == 4
    assert (
        out.count('What to do: Install a torch that it was built for (pip install "torch==2.99.*")')
        == 4
    )


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0+cu130"])
def test_a_torch_too_old_or_too_new_says_what_to_install(version):
    out = clean(f"""
        import importlib.machinery, importlib.util, sys

        class Loader(importlib.machinery.SourceFileLoader):
            def exec_module(self, module):
                super().exec_module(module)
                module.__version__ = {version!r}

        class Finder:
            def find_spec(name, path=None, target=None):
                if name == "torch.version":
                    return importlib.util.spec_from_loader(
                        name, Loader(name, path[0] + "/version.py")
                    )

        sys.meta_path.insert(0, Finder)
        import torch
        from tpu_core.errors import VersionMismatchError

        assert torch.__version__ == {version!r} and torch.ones(2).sum() == 2
        assert not torch.tpu.is_available()
        try:
            torch.ones(2, device="tpu")
        except VersionMismatchError as error:
            print(error)
    """)
    assert f"but torch {version} is installed." in out
    assert 'What to do: Install a torch that it was built for (pip install "torch==2.' in out


@pytest.mark.parametrize(
    ("name", "version"), [("jaxlib", "0.9.2"), ("jaxlib", "0.13.0"), ("jax", "0.9.2")]
)
def test_a_jax_too_old_or_too_new_says_what_to_install(name, version):
    out = clean(f"""
        import sys
        import torch
        assert torch.tpu.is_available() and torch.ones(2).sum() == 2
        from importlib import metadata
        from tpu_core.errors import VersionMismatchError

        known = metadata.version
        metadata.version = lambda name: {version!r} if name == {name!r} else known(name)
        for _ in range(2):
            try:
                torch.ones(2, device="tpu")
            except VersionMismatchError as error:
                print(error)
        assert "jax" not in sys.modules
    """)
    what = f"tpu_core works with {name} <0.13,>=0.10, but {name} {version} is installed."
    assert out.count(f"[TPU1002] {what}") == 2
    assert out.count('Install one that fits: pip install "jax<0.13,>=0.10"') == 2


def test_without_jaxlib_the_first_use_says_what_to_install():
    out = clean("""
        import torch
        from importlib import metadata
        from tpu_core.errors import VersionMismatchError

        known = metadata.version
        def version(name):
            if name == "jaxlib":
                raise metadata.PackageNotFoundError(name)
            return known(name)
        metadata.version = version
        try:
            torch.ones(2, device="tpu")
        except VersionMismatchError as error:
            print(error)
    """)
    assert "[TPU1002] jaxlib is not installed." in out


def test_an_extension_of_other_sources_says_so():
    out = clean(
        EXTENSION
        + textwrap.dedent("""
        extension.CORE.sources_digest = lambda: "of a later checkout"
        import torch
        from tpu_core.errors import VersionMismatchError
        try:
            torch.ones(2, device="tpu")
        except VersionMismatchError as error:
            print(error)
    """)
    )
    assert "built from other sources than those beside it" in out
    assert "What to do: Rebuild it" in out


def test_an_extension_that_does_not_load_says_so(tmp_path):
    out = clean("""
        import sys
        sys.modules["tpu_core._C"] = None  # what a missing or unloadable extension looks like
        import torch
        from tpu_core.errors import VersionMismatchError
        try:
            torch.ones(2, device="tpu")
        except VersionMismatchError as error:
            print(error)
    """)
    assert "[TPU1002] The extension of tpu_core cannot be loaded into torch 2." in out


def test_loading_twice_changes_nothing():
    out = clean("""
        import torch, tpu_core._autoload
        before = torch.tpu
        tpu_core._autoload.load()
        print(torch.tpu is before, torch.ones(2, device="tpu").sum().item())
    """)
    assert out == "True 2.0\n"


def test_without_autoload_importing_the_package_registers_the_device():
    out = clean(
        """
        import torch
        assert not hasattr(torch, "tpu")
        import tpu_core
        print(torch.ones(2, device="tpu").sum().item())
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert out == "2.0\n"
