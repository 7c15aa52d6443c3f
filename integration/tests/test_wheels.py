"""The wheels that ``nox -s build`` makes, installed into a clean environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
WHEELS = sorted((ROOT / "dist").glob("*.whl"))
ATTENTION = "aten._scaled_dot_product_fused_attention_overrideable"
PACKAGES = {"tpu_core", "tpu_eager", "tpu_compile", "tpu_kernels", "tpu_distributed"}
EXTENSIONS = {"tpu_core", "tpu_distributed"}


def run(python: Path, code: str, **environment: str) -> str:
    result = subprocess.run(
        [python, "-c", code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        cwd=python.parent,  # not the repository, whose sources could be imported instead
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture(scope="module")
def clean_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a new environment that holds the wheels and nothing else of this project.

    Their dependencies are not downloaded again (torch alone is hundreds of megabytes): a path file
    points at the site-packages of the environment that runs the tests. Python does not read the
    path files of a folder that it reaches that way, so the editable installs there stay invisible.
    """
    assert {w.name.split("-")[0] for w in WHEELS} == PACKAGES, "run `nox -s build` first"
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, system_site_packages=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    options = ["--no-index", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, *options, *WHEELS], check=True)
    site = Path(run(python, "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "shared_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_import_of_torch_finds_the_installed_device(clean_python: Path) -> None:
    printed = run(
        clean_python,
        "import torch, tpu_core, tpu_eager\n"
        "x = torch.arange(4.0, device='tpu', requires_grad=True)\n"
        "(x * x).sum().backward()\n"
        "print(x.grad.tolist(), torch.tpu.eager_mode)\n"
        "print(tpu_core.__file__); print(tpu_eager.__file__)",
    )
    result, *files = printed.splitlines()
    assert result == "[0.0, 2.0, 4.0, 6.0] fused"
    assert all(str(clean_python.parents[1]) in file for file in files), files


def test_collectives_of_the_installed_wheels(clean_python: Path) -> None:
    printed = run(
        clean_python,
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)\n"
        "x = torch.ones(3, device='tpu')\n"
        "dist.all_reduce(x)\n"
        "print(x.tolist())\n"
        "from tpu_distributed import _C\n"
        "print(_C.__file__)\n"
        "dist.destroy_process_group()",
    )
    result, file = printed.splitlines()
    assert result == "[1.0, 1.0, 1.0]"
    assert str(clean_python.parents[1]) in file


def test_entry_points_of_the_installed_wheels(clean_python: Path) -> None:
    printed = run(
        clean_python,
        "from importlib.metadata import distribution\n"
        "for name in ('tpu-core', 'tpu-eager', 'tpu-compile', 'tpu-kernels', 'tpu-distributed'):\n"
        "    d = distribution(name)\n"
        "    where = str(d.locate_file(''))\n"
        f"    assert {str(clean_python.parents[1])!r} in where, where\n"
        "    for e in sorted(d.entry_points, key=lambda e: (e.group, e.name)):\n"
        "        print(e.group, e.name, callable(e.load()))\n",
    )
    assert printed.splitlines() == [
        "console_scripts tpu True",
        "torch.backends tpu True",
        "tpu_core.modes debug False",
        "tpu_core.modes fused False",
        "torch.backends tpu_compile True",
        "torch_dynamo_backends tpu True",
        "tpu_core.cli aot True",
        "tpu_core.topology_compilers libtpu True",
        "tpu_compile.losses cross_entropy True",
        "tpu_core.cli tune True",
        "tpu_core.device_modules pallas False",
        "tpu_core.kernels aten._grouped_mm.default False",
        f"tpu_core.kernels {ATTENTION}.default False",
        f"tpu_core.kernels {ATTENTION}_backward.default False",
        "tpu_core.kernels aten._weight_int4pack_mm.default False",
        "tpu_core.kernels tpu_kernels.int4_mm.default False",
        "tpu_core.kernels tpu_kernels.linear_cross_entropy.default False",
        "tpu_core.kernels tpu_kernels.linear_cross_entropy_backward.default False",
        "tpu_core.kernels tpu_kernels.paged_attention.default False",
        "tpu_core.kernels tpu_kernels.ragged_paged_attention.default False",
        "torch.backends tpu_distributed True",
        "tpu_core.cli flights True",
        "tpu_core.cli launch True",
    ]
    assert (clean_python.parent / "tpu").exists()


def test_autoload_can_be_turned_off(clean_python: Path) -> None:
    code = "import sys, torch; print(hasattr(torch, 'tpu'), 'tpu_core' in sys.modules)"
    assert run(clean_python, code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").split() == ["False", "False"]


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_wheel_holds_what_it_should(package: str) -> None:
    (wheel,) = (w for w in WHEELS if w.name.startswith(package))
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        licence = archive.read(next(n for n in names if n.endswith("licenses/LICENSE")))
        metadata = message_from_string(
            archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
        )
    assert f"{package}/py.typed" in names
    assert not [n for n in names if n.endswith(".cpp") or "/tests/" in n]
    headers = {n for n in names if n.endswith(".h")}
    assert headers == ({"tpu_core/include/tpu_core/python.h"} if package == "tpu_core" else set())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Requires-Python"] == "<3.15,>=3.11"
    needed = map(Requirement, metadata.get_all("Requires-Dist"))
    required = {r.name: str(r.specifier) for r in needed if "extra" not in str(r.marker)}
    if package == "tpu_core":
        assert required["torch"] == "<2.16,>=2.11"
        assert required["jax"] == required["jaxlib"] == "<0.13,>=0.10"
        assert "tpu_core/conformance/device_contract.toml" in names
    else:
        assert set(required) == {"tpu-core"}
    if package in EXTENSIONS:
        installed = "_".join(torch.__version__.split(".")[:2])
        assert [n for n in names if re.match(rf"{package}/_extensions/torch_{installed}/_C\.", n)]
        assert "manylinux_2_" in wheel.name
    else:
        assert wheel.name.endswith("-none-any.whl")
