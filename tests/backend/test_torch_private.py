"""What we lean on inside torch: each assumption fails here, loudly, when it moves."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
import torch

import cp_inductor
from cp_inductor.torch_private import leaned_on, probes
from cp_inductor.torch_private.inductor import triton_for_this_torch
from cp_inductor.torch_private.probes import PROBES


def test_torch_is_one_that_was_read() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert (2, 13) <= (major, minor) < (2, 16), "read the shim's sources in this version first"


LEANED_ON = leaned_on.leaned_on()
TEXTS = " ".join(text for texts in leaned_on.TEXTS.values() for text in texts)


@pytest.mark.parametrize("place", sorted(LEANED_ON))
def test_private_names_are_where_they_were_read(place: str) -> None:
    if "triton" in place:
        pytest.importorskip("triton")
    assert leaned_on.what_moved(place, LEANED_ON[place]) is None


@pytest.mark.parametrize(
    ("module", "text"),
    [(module, text) for module, texts in leaned_on.TEXTS.items() for text in texts],
)
def test_texts_are_where_they_were_read(module: str, text: str) -> None:
    assert leaned_on.text_gone(module, text) is None


@pytest.mark.parametrize("name", PROBES)
def test_torch_does_what_was_read(name: str) -> None:
    assert PROBES[name]() is None


def test_what_is_other_than_expected_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "gone" in str(leaned_on.text_gone("torch._inductor.nowhere", "x"))
    assert "no 'no such text'" in str(leaned_on.text_gone("torch._inductor.utils", "no such text"))
    monkeypatch.setattr(
        torch.utils.checkpoint, "checkpoint", lambda *args, **kwargs: args[0](args[1])
    )
    monkeypatch.setattr(probes, "checkpoint", torch.utils.checkpoint.checkpoint)
    assert "[0] checkpoints" in str(PROBES["a checkpoint"]())
    monkeypatch.setattr(probes.F, "scaled_dot_product_attention", lambda *args, **kwargs: None)
    assert "no error" in str(PROBES["attn_mask beside is_causal"]())


# Rooms whose private names may be those of other libraries.
FOREIGN = ("integrations", "modules")

# Private names of Python itself, and attributes that this package adds to objects of others.
NOT_OF_TORCH = {"_exit", "_getframe", "_value_", "_value2member_map_", "_name_", "_shared_state"}
NOT_OF_TORCH |= {"_cp_inductor_note"}
# The backend "fake" of a pretended kernel's namespace, namespaces of ops, and what only some
# releases have and the code asks for.
NOT_OF_TORCH |= {"_OpNamespace", "_c10d_functional", "_c10d_functional_autograd"}
NOT_OF_TORCH |= {"_add_batch_dim", "_get_data_attr"}
# Nodes of a graph have these, whoever made it.
META_OF_ALL = {"val", "example_value", "stack_trace", "custom"}


def files() -> dict[str, ast.Module]:
    root = Path(cp_inductor.__file__).parent
    folders = [root, root / "passes"]
    paths = {path for folder in folders for path in folder.rglob("*.py")}
    return {
        str(path.relative_to(root)): ast.parse(path.read_text())
        for path in sorted(paths)
        if not path.relative_to(root).parts[0].startswith(FOREIGN)
    }


def private_names_in(tree: ast.Module) -> set[str]:
    """Return what starts with one underscore, is no variable here, and is read of a value."""
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root = ast.unparse(node.value)
            if root in ("self", "cls"):
                own.add(node.attr)
            # Those of torch.ops are looked up when they are imported.
            elif not re.match(r"torch\.ops|(aten|c10d)(\.|$)", root):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            found |= {
                arg.value
                for arg in node.args
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            }
    return {name for name in found - own if name.startswith("_") and not name.startswith("__")}


def test_private_names_are_all_listed() -> None:
    """What the doctor does not see cannot be told from a defect of ours when torch moves it."""
    known = {part for place in LEANED_ON for part in re.split(r"[.:]", place)}
    trees = files()
    own = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    unlisted = {
        (file, name)
        for file, tree in trees.items()
        for name in private_names_in(tree) - known - own - NOT_OF_TORCH
        if name not in TEXTS
    }
    assert not unlisted


def test_keys_of_meta_are_all_listed() -> None:
    keys = set()
    for file, tree in files().items():
        for node in ast.walk(tree):
            at: ast.expr | None = None
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(".meta"):
                at = node.slice
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".meta.get"):
                at = node.args[0]
            if isinstance(at, ast.Constant) and isinstance(at.value, str):
                keys.add((file, at.value))
    assert keys
    assert not {(file, key) for file, key in keys if key not in TEXTS and key not in META_OF_ALL}


def changes_in(tree: ast.Module) -> set[str]:
    """Return the functions of a file that put something else in place of what a module has."""
    found = set()
    for outer in tree.body:
        methods = [outer] if isinstance(outer, ast.FunctionDef) else []
        if isinstance(outer, ast.ClassDef):
            methods = [one for one in outer.body if isinstance(one, ast.FunctionDef)]
        for method in methods:
            name = method.name if method is outer else f"{outer.name}.{method.name}"  # type: ignore[attr-defined]
            for node in ast.walk(method):
                text = ast.unparse(node) if isinstance(node, (ast.Call, ast.Assign)) else ""
                is_patch = text.startswith(("mock.patch.", "setattr("))
                if isinstance(node, ast.Assign):
                    target = node.targets[0]
                    is_patch = isinstance(target, ast.Attribute) and not ast.unparse(
                        target
                    ).startswith("self.")
                if is_patch and not text.startswith("setattr(self,"):
                    found.add(name)
    return found


# What these change is an object that they made or that this package owns, or an option of torch.
CHANGE_THEIR_OWN = {
    "torch_private.dtensor:torchs_load_balance",
    "torch_private.tracing:known_results",
    "torch_private.dispatch:become",
    "torch_private.dynamo:as_backend_error",
    "torch_private.inductor:put_label",
    "torch_private.traces:Traces._switch",
}
# Their changes are of tables, which is not seen in their text.
CHANGE_TABLES = {
    "torch_private.dtensor:register_dtensor_handler",
    "torch_private.modes:let_modes_see",
}


def test_every_patch_has_a_row() -> None:
    changing = {
        f"{file.removesuffix('.py').replace('/', '.')}:{name}"
        for file, tree in files().items()
        if file.startswith("torch_private/") or file == "inspect/pretend.py"
        for name in changes_in(tree)
    }
    rows = {patch["by"].strip("`") for patch in leaned_on.patches()}
    assert all(all(patch.values()) for patch in leaned_on.patches())
    assert changing - CHANGE_THEIR_OWN == rows - CHANGE_TABLES
    for row in rows:
        module, _, name = row.partition(":")
        assert attrgetter(name)(import_module(f"cp_inductor.{module}"))


def test_the_triton_of_this_torch() -> None:
    triton = pytest.importorskip("triton")
    assert triton.__version__.split("+")[0] == triton_for_this_torch()
