"""The direction of imports, and the two names of the passes' folder."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# errors <- config <- plan <- ops <- passes <- backend, with what each of them is made of.
LAYERS = (
    ("errors", "config", "plan"),
    ("torch_private",),
    ("kernels", "sharding", "limits", "layouts", "loss", "gradients"),
    ("combine", "nodes", "subgraphs"),
    ("exchange", "recipes"),
    ("masks",),
    ("execute",),
    ("ops",),
    ("parallel",),
    ("regions",),
    ("context", "style"),
    ("passes",),
    ("backend",),
    ("inspect",),
    ("__main__",),
)


def layer_of(module: str) -> int:
    name = module.split(".")[1]
    return next(index for index, names in enumerate(LAYERS) if name in names)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "cp_inductor":
            found.add(node.module)
        elif isinstance(node, ast.ImportFrom) and node.module == "cp_inductor":
            found |= {f"cp_inductor.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("cp_inductor.")}


def sources() -> dict[str, Path]:
    files = [*ROOT.glob("cp_inductor/*.py"), *ROOT.glob("cp_inductor/plan/*.py")]
    files += ROOT.glob("cp_inductor/inspect/*.py")
    files += ROOT.glob("cp_inductor/passes/*.py")
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in files
        if path.parent.name != "cp_inductor" or path.name != "__init__.py"
    }
    assert len(names) > 12
    return names


@pytest.mark.parametrize("module", sorted(sources()))
def test_nothing_imports_upward(module: str) -> None:
    for imported in imports(sources()[module]):
        assert layer_of(imported) <= layer_of(module), f"{module} imports {imported}"


def test_only_the_pipeline_imports_several_passes() -> None:
    for module, path in sources().items():
        passes = {name for name in imports(path) if name.startswith("cp_inductor.passes.")}
        if module not in ("cp_inductor.passes.pipeline", "cp_inductor.backend"):
            assert len(passes) <= 1, module


def test_only_the_shim_leans_on_private_modules() -> None:
    """What moves between torch versions stands in one file; the known rest is listed here."""
    known = {
        "cp_inductor.config": {"torch.utils._config_module"},
        "cp_inductor.backend": {
            "torch._dynamo.backends.common",
            "torch._functorch.aot_autograd",
            "torch._functorch.partitioners",
            "torch._inductor",
            "torch._inductor.compile_fx",
            "torch._inductor.decomposition",
        },
        "cp_inductor.inspect.cross_compile": {"torch._inductor", "torch._inductor.compile_fx"},
        "cp_inductor.inspect.retarget": {
            "torch._inductor.custom_graph_pass",
            "torch._inductor.decomposition",
        },
        # The backend "fake" is torch's own for tests; there is no other world without peers.
        "cp_inductor.inspect.world": {"torch.testing._internal.distributed.fake_pg"},
        "cp_inductor.passes.pipeline": {"torch._dynamo.utils", "torch._logging"},
        "cp_inductor.passes.pin_order": {"torch._inductor.custom_graph_pass"},
    }
    for module, path in sources().items():
        if module == "cp_inductor.torch_private":
            continue
        private = {
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("torch.")
            and any(part.startswith("_") for part in node.module.split("."))
        }
        assert private <= known.get(module, set()), module


def test_the_passes_have_one_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "import cp_inductor.passes" in done.stderr


def test_the_environment_is_read_in_config_alone() -> None:
    for module, path in sources().items():
        text = path.read_text() if module != "cp_inductor.config" else ""
        assert "os.environ" not in text and "getenv" not in text, module
