"""Check whether this installation can compile and run, and say how to repair what it lacks.

torch           ok       2.13.0
triton          warning  none: no Triton code      pip install 'cp-inductor[triton]'
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from cp_inductor.backend.steps import exchanges_in
from cp_inductor.inspect.cross_compile import cross_compile
from cp_inductor.torch_private.inductor import cache_folder, cpp_compiler, triton_for_this_torch
from cp_inductor.torch_private.leaned_on import TEXTS, leaned_on, patches, text_gone, what_moved
from cp_inductor.torch_private.probes import PROBES

OLDEST, NEWEST = (2, 13), (2, 15)
BACKENDS = ("cp_inductor", "cp_aot_eager")


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        name: what was checked.
        state: "ok", "warning" (some feature is unavailable) or "problem" (nothing will work).
        found: what was found, for people.
        remedy: what to do about it, for people; "" if there is nothing to do.
    """

    name: str
    state: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        """Return the result as one line, plus one for the remedy if there is one."""
        line = f"{self.name:<16}{self.state:<9}{self.found}"
        return f"{line}\n{'':<25}-> {self.remedy}" if self.remedy else line


def examine() -> tuple[Check, ...]:
    """Check torch, its inside, triton, the backends, code, caches, compilers and the group."""
    checks = (_generated_code, _triton, _backends, _cache, _compiler, _group, _devices)
    return (_torch(), *_private(), *(check() for check in checks))


def _torch() -> Check:
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if OLDEST <= release <= NEWEST:
        return Check("torch", "ok", torch.__version__)
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    versions = f"{torch.__version__}; supported are {oldest} to {newest}"
    state = "problem" if release < OLDEST else "warning"
    return Check("torch", state, versions, f"pip install 'torch>={oldest},<={newest}.*'")


def _private() -> Iterator[Check]:
    has_triton = _installed("triton")
    known = leaned_on().items()
    names = {place: wanted for place, wanted in known if has_triton or "triton" not in place}
    texts = [(module, text) for module, expected in TEXTS.items() for text in expected]
    wrong = [("problem", place, what_moved(place, wanted)) for place, wanted in names.items()]
    wrong += [("warning", module, text_gone(module, text)) for module, text in texts]
    wrong += [("problem", name, probe()) for name, probe in PROBES.items()]
    moved = [(state, f"{place}: {what}") for state, place, what in wrong if what is not None]
    if not moved:
        yield Check(
            "torch inside",
            "ok",
            f"all {len(names)} private names are as expected, as are {len(texts)} texts of sources"
            f" and {len(PROBES)} behaviours; {len(patches())} patches (--patches lists them)",
        )
    for state, what in moved:
        remedy = "install a supported torch, or report it: cp_inductor/torch_private/leaned_on.py"
        yield Check("torch inside", state, what, remedy)


def _generated_code() -> Check:
    """Compile an attention of two ranks, up to the code, and look for what errors are read by."""
    name, query = "generated code", torch.empty(1, 1, 8, 8, device="meta")
    try:
        with torch.no_grad():
            attend = partial(scaled_dot_product_attention, is_causal=True)
            compiled = cross_compile(attend, (query,) * 3, world_size=2, rank=1, target="cpu")
        labels = exchanges_in(compiled.code["inference"])
    except Exception as error:
        remedy = "install a supported torch, or report the error"
        return Check(name, "problem", f"an attention does not compile: {error}", remedy)
    if not labels or None in labels:
        text = f"its exchanges have the labels {labels}: one that fails is not named"
        remedy = "install a supported torch, or report it: cp_inductor/backend/steps.py"
        return Check(name, "warning", text, remedy)
    return Check(name, "ok", f"an attention of two ranks, {len(labels)} labelled collectives")


def _triton() -> Check:
    installed, wanted = _installed("triton"), triton_for_this_torch()
    if installed is None:
        remedy = f"pip install 'cp-inductor[triton]' triton=={wanted}"
        return Check("triton", "warning", "not installed: cannot generate code for GPUs", remedy)
    if wanted != "any" and installed.split(".")[:2] != wanted.split(".")[:2]:
        remedy = f"pip install triton=={wanted}"
        return Check("triton", "warning", f"{installed}; this torch needs {wanted}", remedy)
    return Check("triton", "ok", installed)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _backends() -> Check:
    registered = {entry.name for entry in entry_points(group="torch_dynamo_backends")}
    missing = [name for name in BACKENDS if name not in registered]
    if missing:
        return Check(
            "backends",
            "problem",
            f"torch.compile does not find {' and '.join(missing)}",
            "install the package (pip install -e .), or import cp_inductor.backend and pass the"
            " function: torch.compile(model, backend=cp_inductor.backend.cp_inductor)",
        )
    return Check("backends", "ok", f"{' and '.join(BACKENDS)}, by entry point")


def _cache() -> Check:
    folder = Path(cache_folder())
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    probe = parent / f".cp_inductor_{id(folder)}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        remedy = "set TORCHINDUCTOR_CACHE_DIR to a folder that you can write to"
        return Check("cache", "problem", f"{folder} cannot be written: {error.strerror}", remedy)
    free = shutil.disk_usage(parent).free
    if free < 2**30:
        remedy = "set TORCHINDUCTOR_CACHE_DIR to a disk with more room"
        return Check("cache", "warning", f"{folder}, {free / 2**20:.0f} MiB free", remedy)
    return Check("cache", "ok", f"{folder}, {free / 2**30:.0f} GiB free")


def _compiler() -> Check:
    compiler = cpp_compiler()
    if compiler is None:
        state, remedy = "none: models on the CPU will not compile", "install g++ or clang++"
        return Check("C++ compiler", "warning", state, f"{remedy}, or set CXX to a compiler")
    return Check("C++ compiler", "ok", compiler)


def _group() -> Check:
    if not dist.is_available():
        remedy = "install a torch built with USE_DISTRIBUTED=1"
        return Check("process group", "problem", "this torch has no torch.distributed", remedy)
    names = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    there = ", ".join(name for name, is_there in names.items() if is_there) or "no backend"
    if not dist.is_initialized():
        return Check("process group", "ok", f"none in this process; available: {there}")
    text = f"rank {dist.get_rank()} of {dist.get_world_size()}, {dist.get_backend()}"
    return Check("process group", "ok", text)


def _devices() -> Check:
    if not torch.cuda.is_available():
        return Check("devices", "ok", "CPU; cross_compile generates code for GPUs")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Check("devices", "ok", ", ".join(names))
