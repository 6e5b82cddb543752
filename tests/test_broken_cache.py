"""A compile cache that is full, read-only or corrupted: survived, and never loaded half-written.

Each case runs in a process of its own, which compiles, trains a step and compares it with eager
code. Rooms without space are made by mounts, which need root: elsewhere these cases are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import cp_inductor  # noqa: F401 - registers the backends
from cp_inductor.torch_private import inductor_cache
from cp_inductor.torch_private.inductor_cache import is_cut_off
from tests.ranks import _processes, forget_compiles

# Forked processes have loaded nothing yet, but for what their parent has.
DEADLINE_S = 240


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 1, 16)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).square().mean()


def train(cache: str) -> dict[str, Any]:
    """Train a step with this cache folder; return what the caches did, and where it compiled."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.manual_seed(0)
    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    forget_compiles()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    model, x = Model(), torch.randn(2, 8, 16)
    expected = model(x)
    expected.backward()
    expected_grad = model.project.weight.grad
    model.zero_grad()
    compiled = torch.compile(model, backend="cp_inductor", fullgraph=True, options={"mesh": mesh})
    loss = compiled(x)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.project.weight.grad, expected_grad)
    dist.destroy_process_group()
    return {
        "fx_hit": counters["inductor"]["fxgraph_cache_hit"],
        "left": [str(folder) for folder in inductor_cache._others],
        "folder": os.environ["TORCHINDUCTOR_CACHE_DIR"],
    }


def serve(pipe: Connection, function: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def run_apart(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a process of its own."""
    ours, theirs = _processes.Pipe()
    process = _processes.Process(target=serve, args=(theirs, function, args), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(DEADLINE_S), "it hangs"
        is_ok, value = ours.recv()
        process.join(20)  # it leaves nothing behind
    except EOFError:
        process.join(5)
        pytest.fail(f"the process died with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()
    assert is_ok, value
    return value


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds all that the model needs."""
    folder = tmp_path_factory.mktemp("caches") / "warm"
    run_apart(train, str(folder))
    return folder


def copy_of(warm: Path, tmp_path: Path) -> Path:
    """Return a copy. What is in it refers to the folder's own name."""
    shutil.copytree(warm, tmp_path / "kept")
    return tmp_path / "kept"


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def cut_at_a_line(data: bytes) -> bytes:
    """Without the last statements of the function: still Python."""
    lines = data.splitlines(keepends=True)
    (first,) = (n for n, line in enumerate(lines) if line.lstrip().startswith(b"def call("))
    last = next(n for n in range(first, len(lines)) if lines[n].lstrip().startswith(b"return ("))
    return b"".join(lines[:last])


def of_another_version(data: bytes) -> bytes:
    """Return a pickle of what this torch does not have."""
    return b"ctorch\na_name_that_another_torch_has\n."


def kernels_in(folder: Path) -> list[Path]:
    """Return the libraries of kernels; by others Inductor probes what the CPU can do."""
    found = folder.glob("*/*.so")
    return [path for path in found if "PyInit_kernel" in path.with_suffix(".cpp").read_text()]


KINDS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "empty libraries": ("*/*.so", lambda data: b""),
    "half of each library": ("*/*.so", cut),
    "libraries without their last bytes": ("*/*.so", lambda data: data[:-1]),
    "half of each module": ("*/*.py", cut),
    "empty modules": ("*/*.py", lambda data: b""),
    "modules cut at a line": ("*/*.py", cut_at_a_line),
    "graphs of another version": ("fxgraph/*/*/*", of_another_version),
    "half of each graph": ("fxgraph/*/*/*", cut),
    "forward and backward of another version": ("aotautograd/*/*", of_another_version),
    "half of each forward and backward": ("aotautograd/*/*", cut),
    "half of every file": ("**/*", cut),
    "empty files": ("**/*", lambda data: b""),
}
ALWAYS = ("empty libraries", "half of each module", "half of every file")


def damage(folder: Path, kind: str) -> int:
    """Damage files of a cache in place; return how many."""
    pattern, change = KINDS[kind]
    files = [path for path in folder.glob(pattern) if path.is_file() and path.suffix != ".lock"]
    if pattern == "*/*.so":
        files = kernels_in(folder)
    num_damaged = 0
    for path in files:
        is_module = path.suffix == ".py" and b"def call(" in path.read_bytes()
        if change is cut_at_a_line and not is_module:
            continue
        path.write_bytes(change(path.read_bytes()))
        num_damaged += 1
    return num_damaged


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.slow if k in ALWAYS else pytest.mark.long) for k in KINDS],
)
def test_damage_is_survived_and_repaired(kind: str, warm: Path, tmp_path: Path) -> None:
    kept = copy_of(warm, tmp_path)
    try:
        assert damage(warm, kind) > 0
        run_apart(train, str(warm))
        if "libraries" in kind or "library" in kind:
            assert not any(map(is_cut_off, kernels_in(warm)))
        again = run_apart(train, str(warm))
        assert again["fx_hit"] == 2, "it was not repaired"
        assert again["left"] == []
    finally:
        shutil.rmtree(warm)
        shutil.copytree(kept, warm)


@pytest.mark.slow
def test_a_library_that_is_cut_off_is_told_from_a_whole_one(warm: Path, tmp_path: Path) -> None:
    (*_, library) = warm.glob("*/*.so")
    data = library.read_bytes()
    assert not is_cut_off(library)
    piece = tmp_path / "piece.so"
    for length in (0, 1, 63, 64, 1000, len(data) // 2, len(data) - 1):
        piece.write_bytes(data[:length])
        assert is_cut_off(piece), length


# --- Folders that cannot be written to ---------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one page, which is full."""
    yield from mounted(tmp_path / "disk", "size=4k")


@pytest.fixture
def disk_that_fills_up(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for what is written first, but not for a compiled kernel."""
    yield from mounted(tmp_path / "disk", "size=64k")


@pytest.fixture
def disk_to_read(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "ro")


def mounted(place: Path, option: str) -> Iterator[Path]:
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting takes rights that this process does not have")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize(
    "disk",
    [
        pytest.param("small_disk", marks=pytest.mark.slow),
        pytest.param("disk_that_fills_up", marks=pytest.mark.long),
        pytest.param("disk_to_read", marks=pytest.mark.long),
    ],
)
def test_a_disk_that_cannot_be_written_to(disk: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(disk)
    done = run_apart(train, str(folder))
    (other,) = done["left"]
    assert done["folder"] == str(folder), "the user's folder is not what it was"
    assert other != str(folder)


def test_the_folder_in_its_stead_goes_with_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    others, given, inside = run_apart(leave_folder, str(tmp_path / "file" / "cache"))
    assert inside == others[0]
    assert given == str(tmp_path / "file" / "cache")
    assert not Path(others[0]).exists()


def leave_folder(cache: str) -> tuple[list[str], str, str]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    with inductor_cache.sound_cache():
        inside = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        assert Path(inside).is_dir()
    return [str(o) for o in inductor_cache._others], os.environ["TORCHINDUCTOR_CACHE_DIR"], inside
