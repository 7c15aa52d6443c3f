"""Tasks of the repository: ``nox -s quickstart``, ``nox -s tests``, ``nox -l`` for the rest.

torch is large, so the sessions do not get an environment each: they share one, ``.nox/env``, which
the first of them creates. It gets torch first and alone, then the tools a session needs, then the
packages of this repository (editable, built against that torch). What is already there and
unchanged is not installed again. The unit tests of a package run in an environment of their own
that links what the package and its tests declare from the shared one, and lacks everything else.

``TPU_TEST_PYTHON``, ``TPU_TEST_TORCH`` and ``TPU_TEST_JAX`` name other versions, as in
``TPU_TEST_PYTHON=3.13 nox -s tests``; each combination has an environment of its own. ``nox -s
versions`` goes through all that are listed.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.10"
nox.options.sessions = ["tests"]
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent

# The ends of what the packages declare, which `nox -s versions` goes through. A plain
# `nox -s tests` takes the first whose Python is there: torch 2.13 has wheels without CUDA that
# install in seconds, later ones bring 3 GB with them.
VERSIONS = (
    ("3.11", "2.13.0", "0.10.2"),
    ("3.12", "2.11.0", "0.11.2"),
    ("3.12", "2.14.0", "0.11.1"),
    ("3.13", "2.15.0", "0.12.0.1"),
)


def _working(version: str) -> str | None:
    """Path of an interpreter; pyenv puts one on PATH that only says which others it has."""
    paths = os.environ.get("PATH", "").split(os.pathsep)
    paths += map(str, sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}*/bin")))
    for folder in paths:
        found = shutil.which(f"python{version}", path=folder)
        if found and not subprocess.run([found, "-c", ""], capture_output=True).returncode:
            return found
    return None


def _chosen() -> tuple[str, str, str]:
    """Versions of Python, torch and JAX: those that are named, and what goes with them."""
    python = os.environ.get("TPU_TEST_PYTHON")
    if python is None:
        there = (known[0] for known in VERSIONS if _working(known[0]))
        python = next(there, VERSIONS[0][0])
    # Of several the last, and for a Python that is not listed the newest.
    _, torch, jax = next((v for v in reversed(VERSIONS) if v[0] == python), VERSIONS[-1])
    return python, os.environ.get("TPU_TEST_TORCH", torch), os.environ.get("TPU_TEST_JAX", jax)


CHOSEN = _chosen()
PYTHON, TORCH, JAX = CHOSEN[0], f"torch=={CHOSEN[1]}", f"jax=={CHOSEN[2]}"
# In the order of their dependencies.
PACKAGES = ("tpu-core", "tpu-eager", "tpu-compile", "tpu-kernels", "tpu-distributed")
# Scripts; the rest is what they share.
BENCHMARKS = (
    *("import_time", "recording_cost", "jax_op_cost", "overlap", "models", "collectives"),
    *("scan_layers", "aot", "distributed", "programs", "single_ops"),
)
# What `tpu_aot` runs.
TPU_AOT = tuple(
    f"integration/tests/test_{what}.py"
    for what in ("aot_models", "aot_kernels", "aot_distributed", "kernels_for_gpt")
)
ENV = ROOT / ".nox" / ("env" if CHOSEN == VERSIONS[0] else "-".join(("env", *CHOSEN)))
STAMPS = ENV / "installed.json"
DIST = ROOT / "dist"
# A file that changes what an editable install has built or recorded; other Python files are read
# from the source tree.
BUILD_INPUTS = ("pyproject.toml", "setup.py", "src/*/_version.py", "src/*/csrc/**/*.*")
# Those of tpu-core that change what each package with an extension has built.
SHARED_INPUTS = ("src/tpu_core/cpp_build.py", "src/tpu_core/include/**/*.h")

EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # git's name of it

# `nox -s NAME --python 3.11` finds the sessions; the shared environment replaces nox's own.
session = nox.session(python=PYTHON, venv_backend="none")


# --- the shared environment ---------------------------------------------------------------------


def interpreter(s: nox.Session) -> str:
    """Python of the version the packages need: the one running nox, else the first on PATH."""
    if sys.version_info[:2] == tuple(int(x) for x in PYTHON.split(".")):
        return sys.executable
    found = _working(PYTHON)
    if found is None:
        s.error(
            f"python{PYTHON} was not found, and nox runs on {sys.version.split()[0]}. "
            f"Install Python {PYTHON}, or install nox into it (python{PYTHON} -m pip install nox)."
        )
    return found


def python(
    s: nox.Session,
    *args: str | Path,
    env: dict[str, str] | None = None,
    environment: Path = ENV,
    **options: Any,
) -> None:
    """Run an environment's Python, its scripts first on PATH."""
    path = f"{environment / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    s.run(
        str(environment / "bin" / "python"),
        *map(str, args),
        env={"PATH": path, "VIRTUAL_ENV": str(environment), **(env or {})},
        external=True,
        **options,
    )


def pip(s: nox.Session, *args: str | Path) -> None:
    python(s, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *args)


def stamps() -> dict[str, str]:
    return json.loads(STAMPS.read_text()) if STAMPS.exists() else {}


def install_once(
    s: nox.Session, name: str, content: str, *requirements: str | Path, force: bool = False
) -> None:
    """Install ``requirements`` unless that was done before with the same ``content``."""
    digest = hashlib.sha256(content.encode()).hexdigest()
    if stamps().get(name) == digest and not force:
        return
    s.log(f"installing {name}")
    pip(s, *requirements)
    STAMPS.write_text(json.dumps({**stamps(), name: digest}, indent=2) + "\n")


def content_hash(package: Path) -> str:
    digest = hashlib.sha256()
    found = [(package, pattern) for pattern in BUILD_INPUTS]
    if (package / "setup.py").exists():
        found += [(ROOT / "packages" / "tpu-core", pattern) for pattern in SHARED_INPUTS]
    for folder, pattern in found:
        for path in sorted(folder.glob(pattern)):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def prepare(s: nox.Session, *groups: str) -> None:
    """Bring the shared environment up to date.

    Args:
        s: The session.
        groups: Dependency groups of the root ``pyproject.toml`` that the session needs.
    """
    if not (ENV / "bin" / "python").exists():
        s.log(f"creating {ENV.relative_to(ROOT)}")
        s.run(interpreter(s), "-m", "venv", "--clear", str(ENV), external=True)
        pip(s, "--upgrade", "pip")
    install_once(s, "torch", TORCH, TORCH)
    for group in ("build", *groups):
        wanted = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), group)
        # torch and JAX are named again so that no dependency can move them.
        install_once(s, f"group {group}", "\n".join(wanted), TORCH, JAX, *wanted)
    tag = f"_C.cpython-{PYTHON.replace('.', '')}-*.so"
    build = f"torch_{'_'.join(CHOSEN[1].split('.')[:2])}/{tag}"
    for name in PACKAGES:
        package = ROOT / "packages" / name
        is_built = any(package.glob(f"src/*/_extensions/{build}"))
        unbuilt = (package / "setup.py").exists() and not is_built
        options: list[str | Path] = [TORCH, JAX, "--no-build-isolation", "--editable", package]
        install_once(s, f"package {name}", content_hash(package), *options, force=unbuilt)


# --- steps, each used by its own session and by `tests` -----------------------------------------


def step_lint(s: nox.Session) -> None:
    # A cached result of a file does not see that the modules around it have changed, and the order
    # of imports depends on them.
    python(s, "-m", "ruff", "check", "--no-cache", ".")
    python(s, "-m", "ruff", "format", "--check", ".")
    python(s, ROOT / "tools" / "cpp_format.py", "--check")
    python(s, ROOT / "tools" / "cpp_tidy.py")
    python(s, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
    python(s, "tools/vocabulary.py")
    # Conflict markers and trailing spaces, in any file.
    s.run("git", "diff", "--check", EMPTY_TREE, external=True)


def step_typecheck(s: nox.Session) -> None:
    python(s, "-m", "mypy")


def pytest(
    s: nox.Session,
    *args: str | Path,
    workers: int = 0,
    may_be_empty: bool = False,
    environment: Path = ENV,
) -> None:
    """Run pytest, in ``workers`` processes if not 0: two at most, as each compiles on its own."""
    parallel = ("-n", str(workers)) if workers else ("-p", "no:xdist")
    env = {"OMP_NUM_THREADS": "1"} if workers else {}
    codes = [0, 5] if may_be_empty or s.posargs else [0]  # 5: no test selected
    command = ("-m", "pytest", *parallel, *args, *s.posargs)
    python(s, *command, env=env, environment=environment, success_codes=codes)


def step_unit(s: nox.Session, package: str, *args: str) -> None:
    """Tests of a package in an environment that has the package and what it declares."""
    environment = ENV.with_name(f"{ENV.name}-{package}")
    python(s, "tools/isolated.py", package, environment)
    tests = f"packages/{package}/tests"
    pytest(s, tests, "-m", "not slow", *args, workers=2, environment=environment)


def step_build(s: nox.Session, *args: str) -> None:
    """Make a wheel of each package; object files of an earlier build are used again."""
    shutil.rmtree(DIST, ignore_errors=True)
    python(s, ROOT / "tools" / "wheels.py", *args)


def step_integration(s: nox.Session) -> None:
    step_build(s)  # the wheel test installs them
    pytest(s, "integration/tests", "-m", "not slow", workers=2)


# The theme's notice about MkDocs 2 is answered by docs/adr/0005-mkdocs.md.
MKDOCS = {"NO_MKDOCS_2_WARNING": "1"}


def step_docs(s: nox.Session) -> None:
    python(s, "docs/generate.py")
    python(s, "-m", "mkdocs", "build", "--strict", "--quiet", env=MKDOCS)


def step_versioned_docs(s: nox.Session) -> None:
    """Commit this version's pages to the local branch ``pages``, beside those of other versions."""
    package = ROOT / "packages" / "tpu-core" / "src" / "tpu_core" / "_version.py"
    version = runpy.run_path(str(package))["__version__"].rpartition(".")[0]
    mike = ENV / "bin" / "mike"
    python(
        s, mike, "deploy", "--branch", "pages", "--update-aliases", version, "latest", env=MKDOCS
    )
    python(s, mike, "set-default", "--branch", "pages", "latest")


# --- sessions -----------------------------------------------------------------------------------


@session
def quickstart(s: nox.Session) -> None:
    """Train a character-level GPT on the tpu device; options after ``--`` go to the script."""
    prepare(s, "examples")
    python(s, "examples/train_char_gpt.py", *s.posargs)


@session
def tests(s: nox.Session) -> None:
    """Everything that is not marked slow: lint, types, unit, integration, docs."""
    prepare(s, "lint", "test", "examples", "docs")
    step_lint(s)
    step_typecheck(s)
    for package in PACKAGES:
        step_unit(s, package)
    step_integration(s)
    step_docs(s)


@session
def slow(s: nox.Session) -> None:
    """Tests that take more than a minute each, but those of `tpu_aot`."""
    prepare(s, "test", "examples")
    step_build(s)
    for package in PACKAGES:
        pytest(s, f"packages/{package}/tests", "-m", "slow", may_be_empty=True)
    others = (f"--ignore={ROOT / own}" for own in TPU_AOT)
    pytest(s, "integration/tests", "-m", "slow", *others, may_be_empty=True)


@session
@nox.parametrize("package", PACKAGES)
def unit(s: nox.Session, package: str) -> None:
    """Tests of one package: ``nox -s "unit(package='tpu-core')"``."""
    prepare(s, "test")
    step_unit(s, package)


@session
def integration(s: nox.Session) -> None:
    """Tests across packages, through public names only."""
    prepare(s, "test", "examples")
    step_integration(s)


@session
def libraries(s: nox.Session) -> None:
    """Programs over libraries of others, compared with the CPU.

    torchvision's wheels are for a torch with CUDA: ``TPU_TEST_PYTHON=3.12 TPU_TEST_TORCH=2.14.0
    TPU_TEST_JAX=0.11.1`` name one.
    """
    prepare(s, "test", "libraries")
    s.env["TPU_TIERS"] = "auto"  # as users have it
    pytest(s, "integration/libraries")


@session
def versions(s: nox.Session) -> None:
    """`combination` with each that is listed, or with those of a Python: ``-- 3.12``."""
    failed = []
    for python_version, torch, jax in VERSIONS:
        if s.posargs and python_version not in s.posargs:
            continue
        names = ("TPU_TEST_PYTHON", "TPU_TEST_TORCH", "TPU_TEST_JAX")
        s.log(f"Python {python_version}, torch {torch}, JAX {jax}")
        env = dict(zip(names, (python_version, torch, jax)))
        command = (sys.executable, "-m", "nox", "--session", "combination")
        try:
            s.run(*command, env=env, external=True)
        except CommandFailed:  # the other combinations still run
            failed.append(f"{python_version}/{torch}/{jax}")
    if failed:
        s.error(f"failed: {', '.join(failed)}")


@session
def combination(s: nox.Session) -> None:
    """Unit tests of all packages and 20 steps of the example, on the versions that are named.

    The results go into the page of supported releases, whether they are good or not.
    """
    prepare(s, "test", "examples")
    results = ENV / "results"
    failed = []
    for package in PACKAGES:
        try:
            step_unit(s, package, f"--junit-xml={results / package}.xml")
        except CommandFailed:
            failed.append(package)
        python(s, "docs/support.py", "record", "--junit", results)
    python(s, "examples/train_char_gpt.py", "--steps", "20", "--out", ENV / "out")
    if failed:
        s.error(f"tests failed: {', '.join(failed)}")


@session
def device(s: nox.Session) -> None:
    """Tests, example and the `models` benchmark on a GPU, or as ``TPU_PLATFORM`` says."""
    prepare(s, "test", "examples")
    python(s, ROOT / "tools" / "device.py", *s.posargs)


@session
def lint(s: nox.Session) -> None:
    """Style, formatting, the direction of imports, and vocabulary."""
    prepare(s, "lint")
    step_lint(s)


@session
def typecheck(s: nox.Session) -> None:
    """Type-check the packages' sources."""
    prepare(s, "lint", "test")
    step_typecheck(s)


@session
def docs(s: nox.Session) -> None:
    """Regenerate the reference pages and build the site into ``site/``."""
    prepare(s, "docs")
    step_docs(s)


@session
def bench(s: nox.Session) -> None:
    """Benchmarks, all of them or ``nox -s bench -- models --only mlp``: a table each."""
    prepare(s, "test", "examples")
    folder = ROOT / "integration" / "benchmarks"
    names, options = (s.posargs[:1], s.posargs[1:]) if s.posargs else (BENCHMARKS, [])
    for name in names:
        python(s, folder / f"{name.removesuffix('.py')}.py", *options)


@session
def soak(s: nox.Session) -> None:
    """20,000 training steps: memory must stay flat, and nothing be compiled once warm."""
    prepare(s, "test", "examples")
    python(s, ROOT / "integration" / "benchmarks" / "soak.py", *s.posargs)


@session
def sanitize(s: nox.Session) -> None:
    """Concurrency tests under a sanitizer: address, or ``-- thread``, or ``-- undefined``."""
    prepare(s, "test")
    python(s, ROOT / "tools" / "sanitize.py", *s.posargs)


@session
def conformance(s: nox.Session) -> None:
    """PyTorch's databases of ops, modules and optimizers: ``nox -s conformance -- --shard 3/8``."""
    prepare(s, "test")
    # Of programs, as on a TPU; TPU_TIERS=host asks whether CPU kernels are called as they should.
    tiers = os.environ.get("TPU_TIERS", "compiled")
    env = {"PYTHONPATH": str(ROOT / "integration"), "OMP_NUM_THREADS": "1", "TPU_TIERS": tiers}
    python(s, "-m", "conformance", *s.posargs, env=env)


@session
def fuzz(s: nox.Session) -> None:
    """Fuzzers against the CPU: ``nox -s fuzz -- calls --seconds 3600 --seed 7``; all by default."""
    prepare(s, "test", "examples")
    python(s, "-m", "fuzz", *s.posargs, env={"PYTHONPATH": str(ROOT / "integration")})


@session
def tpu_aot(s: nox.Session) -> None:
    """Every model, every kernel and steps divided over pods, compiled for TPUs; needs none."""
    prepare(s, "test", "examples")
    pytest(s, *TPU_AOT, workers=2)


@session
def build(s: nox.Session) -> None:
    """Wheels of all packages, in ``dist/``: ``-- --torch 2.13,2.14`` for builds for these."""
    prepare(s)
    step_build(s, *s.posargs)


@session
def release(s: nox.Session) -> None:
    """Wheels for each Python with an environment, checked, and all that goes with them.

    `versions` makes the environments. Each wheel has a build for every torch that those of its
    Python have, or for ``-- --torch 2.13,2.14``. The site goes to ``site/`` and, beside those of
    other versions, to the branch ``pages``; nothing is uploaded.
    """
    prepare(s, "examples", "docs", "release")
    shutil.rmtree(DIST, ignore_errors=True)
    python(s, ROOT / "tools" / "release.py", *s.posargs)
    step_docs(s)
    step_versioned_docs(s)


@session
def lock(s: nox.Session) -> None:
    """Lock files of the development environment and of what the packages need, in ``locks/``."""
    prepare(s, "release")
    python(s, ROOT / "tools" / "lock.py", TORCH, JAX)
