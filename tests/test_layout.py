"""The direction of imports, and the two names of the passes' folder."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from cp_inductor.torch_private.leaned_on import LEANED_ON

ROOT = Path(__file__).parents[1]

# errors <- config <- plan <- ops <- passes <- backend, with what each of them is made of.
LAYERS = (
    ("errors", "config", "plan", "source"),
    ("torch_private", "ledger"),
    (
        "kernels",
        "sharding",
        "limits",
        "layouts",
        "loss",
        "gradients",
        "held_layout",
        "distribution",
    ),
    ("ties",),
    ("combine", "nodes", "stand_in", "subgraphs"),
    ("mask", "sequence"),
    ("exchange", "recipes"),
    ("masks",),
    ("execute",),
    ("agreement",),
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
    files += ROOT.glob("cp_inductor/mask/*.py")
    files += ROOT.glob("cp_inductor/sequence/*.py")
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


def private_names(path: Path) -> set[str]:
    """Return what a file imports from torch's private modules, as module:name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {tuple(alias.name.rsplit(".", 1)) for alias in node.names if "." in alias.name}
    return {
        f"{module}:{name}"
        for module, name in found
        if module.split(".")[0] == "torch" and "._" in f"{module}.{name}"
    }


def test_private_modules_of_torch_are_in_the_shim_or_listed() -> None:
    """What compilers offer their backends is imported where it is used; all else by the shim.

    The doctor looks up either.
    """
    inductor = {"torch._inductor:config", "torch._inductor.compile_fx:compile_fx_inner"}
    custom_pass = "torch._inductor.custom_graph_pass:CustomGraphPass"
    decompositions = "torch._inductor.decomposition:select_decomp_table"
    trees = "torch.utils:_pytree"
    known = {
        "cp_inductor.config": {
            "torch.utils._config_module:Config",
            "torch.utils._config_module:install_config_module",
        },
        "cp_inductor.backend": {
            *inductor,
            decompositions,
            "torch._dynamo.backends.common:aot_autograd",
            "torch._functorch.aot_autograd:make_boxed_func",
            "torch._functorch.partitioners:min_cut_rematerialization_partition",
            "torch._inductor:list_mode_options",
            "torch._inductor.compile_fx:compile_fx",
        },
        "cp_inductor.inspect.cross_compile": inductor,
        "cp_inductor.inspect.retarget": {custom_pass, decompositions, trees},
        # The backend "fake" is torch's own for tests; there is no other world without peers.
        "cp_inductor.inspect.world": {
            "torch.testing._internal.distributed.fake_pg:FakeStore",
            trees,
        },
        "cp_inductor.passes.check_sequence": {trees},
        "cp_inductor.passes.inline_multi_head": {trees},
        "cp_inductor.passes.pipeline": {
            "torch._dynamo.utils:counters",
            "torch._logging:trace_structured",
        },
        "cp_inductor.passes.pin_order": {custom_pass},
        "cp_inductor.passes.schedule_exchange": {trees},
        "cp_inductor.sequence.eager": {trees},
        "cp_inductor.sequence.follow_ops": {trees},
        "cp_inductor.sequence.record": {trees},
    }
    for module, path in sources().items():
        if module != "cp_inductor.torch_private.groups":
            assert private_names(path) <= known.get(module, set()), module
    assert set().union(*known.values()) <= LEANED_ON.keys()


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
