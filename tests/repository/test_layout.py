"""The direction of imports, and the two names of the passes' folder."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import cp_inductor
from cp_inductor.passes.pipeline import PASSES
from cp_inductor.torch_private.leaned_on import leaned_on
from tests.support.processes import ROOT, run_python


def sources() -> dict[str, Path]:
    """Return the files of the package, by their modules; passes by the one name they have."""
    folders = [ROOT / "cp_inductor", ROOT / "cp_inductor" / "passes"]
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for folder in folders
        for path in folder.rglob("*.py")
        if path.name != "__init__.py"
    }
    assert "cp_inductor.passes.pipeline" in names and len(names) > 80
    return names


Node = TypeVar("Node", bound=ast.AST)


def nodes_of(kind: type[Node]) -> Iterator[tuple[str, Node]]:
    """Yield the modules of the package with their nodes of a kind."""
    for module, path in sources().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kind):
                yield module, node


def test_rooms_import_what_is_below_them() -> None:
    """The contracts in pyproject.toml, which `make check` prints."""
    program = "from importlinter.cli import lint_imports_command as main; main()"
    assert "3 kept, 0 broken" in run_python("-c", program)


def test_names_with_an_underscore_stay_at_home() -> None:
    for module, node in nodes_of(ast.ImportFrom):
        if (node.module or "").startswith("cp_inductor"):
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            assert not private, f"{module} imports {private} of {node.module}"


def test_no_test_imports_another() -> None:
    """What two of them need stands in tests/support; benchmarks take it from there as well."""
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    texts |= {path: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    for path, text in texts.items():
        own = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        named = set(re.findall(r"\btests\.\w+(?:\.| import )test_\w+", text))
        assert named <= {own}, path


def test_scripts_import_what_exists() -> None:
    """Benchmarks and examples run seldom: a name they import must not move away unseen."""
    missing = []
    for path in [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            if (node.module or "").partition(".")[0] not in ("cp_inductor", "tests"):
                continue
            try:
                module = importlib.import_module(node.module or "")
            except ModuleNotFoundError as error:
                # A library that it is for, such as transformers, need not be installed.
                if (error.name or "").partition(".")[0] in ("cp_inductor", "tests"):
                    raise
                continue
            for alias in node.names:
                if hasattr(module, alias.name):
                    continue
                if importlib.util.find_spec(f"{node.module}.{alias.name}") is None:
                    missing.append(f"{path.name}: {node.module}.{alias.name}")
    assert not missing


def test_public_names() -> None:
    """What users import: a name goes, or comes, only with a line in CHANGELOG.md."""
    names = (
        "BatchPlan CPError ContextParallel CrossCompiled Device Estimate ExchangeFailed"
        " InvalidArgument InvalidText Level Machine MissingTriton ModifiedInPlace"
        " ParallelizeSequence Plan ProcessGroupError RanksDisagree Report"
        " SequenceMixed SequenceWarning UnevenSequence UnsupportedAttention UnsupportedBuffer"
        " UnsupportedKernel UnsupportedPlacement UnsupportedStrategy UnsupportedTarget"
        " UnsupportedWrite UntiedWeights balanced batch_plans calibrate"
        " config context_parallel context_parallel_unshard cross_compile estimate"
        " explain flex_gradients_on_cpu local_attention"
        " loss_weight pad_packed parallelize pass_states per_rank plan_attention"
        " prepared reduce_gradients register_recurrence reset shard"
        " tokens_before unshard"
    )
    assert sorted(cp_inductor.__all__) == names.split()
    assert all(getattr(cp_inductor, name) is not None for name in cp_inductor.__all__)


# Files in the folder of passes that are no pass: the list, what it needs, what passes hand on, and
# the types by which check_sequence checks a graph.
NO_PASSES = {"pipeline", "settings", "report", "attentions", "nodes", "graph_types"}


def test_a_pass_knows_one_other_at_most() -> None:
    """Their order is the pipeline's."""
    known: defaultdict[str, set[str]] = defaultdict(set)
    for module, node in nodes_of(ast.ImportFrom):
        if module.startswith("cp_inductor.passes."):
            known[module] |= set(re.findall(r"^cp_inductor\.passes\.(\w+)$", node.module or ""))
    assert len(known) > len(NO_PASSES)
    for module, passes in known.items():
        assert module.rpartition(".")[2] in NO_PASSES or len(passes - NO_PASSES) <= 1, module


def test_every_pass_is_in_the_list() -> None:
    """A pass that nothing runs, or that something runs beside the list, is found here."""
    files = {
        module.removeprefix("cp_inductor.passes.")
        for module in sources()
        if module.startswith("cp_inductor.passes.")
    }
    listed = {one.name for one in PASSES}
    assert files - NO_PASSES == listed & files
    of_other_files = {"check_ties", "relate_local_lengths", "remove_marks", "settle_local_lengths"}
    of_other_files |= {"guard_whole_lengths", "number_attentions", "number_nodes", "check_ways"}
    of_other_files |= {"check_placements", "bucket_sums", "drop_idle_objects"}
    of_other_files |= {"inline_multi_head", "inline_varlen", "label_exchanges", "relax_views"}
    of_other_files |= {"drop_block_masks", "translate_policy"}
    assert listed - files == of_other_files


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
    known = {
        "torch._dynamo.backends.common:aot_autograd",
        "torch._dynamo.utils:counters",
        "torch._functorch.aot_autograd:make_boxed_func",
        "torch._functorch.partitioners:min_cut_rematerialization_partition",
        "torch._inductor:config",
        "torch._inductor:list_mode_options",
        "torch._inductor.compile_fx:compile_fx",
        "torch._inductor.compile_fx:compile_fx_inner",
        "torch._inductor.custom_graph_pass:CustomGraphPass",
        "torch._inductor.custom_graph_pass:CustomPartitionerFn",
        "torch._inductor.decomposition:select_decomp_table",
        "torch._logging:trace_structured",
        # The backend "fake" is torch's own for tests; there is no other world without peers.
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "torch.testing._internal.distributed.fake_pg:FakeStore",
        "torch.utils:_pytree",
        "torch.utils._config_module:Config",
        "torch.utils._config_module:install_config_module",
    }
    for module, path in sources().items():
        if not module.startswith(("cp_inductor.torch_private.", "cp_inductor.inspect.pretend")):
            assert private_names(path) <= known, module
    assert known <= leaned_on().keys()


def test_the_passes_have_one_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "import cp_inductor.passes" in done.stderr


def test_reset_knows_every_cache() -> None:
    """Nobody keeps results by functools itself, but for the hash of the code that is in memory."""
    # This one is kept within a call.
    others = {"cp_inductor.kept", "cp_inductor.source", "cp_inductor.mask.reader.lengths"}
    for module, node in nodes_of(ast.ImportFrom):
        if node.module == "functools":
            names = {alias.name for alias in node.names}
            assert module in others or not names & {"cache", "lru_cache"}, module


def test_models_of_other_libraries_are_named_in_integrations_alone() -> None:
    for module, node in nodes_of(ast.Constant):
        if not module.startswith(("cp_inductor.integrations.", "cp_inductor.inspect.")):
            assert not str(node.value).startswith("transformers."), module


def test_the_environment_is_read_in_config_alone() -> None:
    # A stage sets it for the processes that it starts.
    for module, path in sources().items():
        text = path.read_text() if module != "cp_inductor.config" else ""
        assert "os.environ" not in text and "getenv" not in text, module
