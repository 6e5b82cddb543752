"""What is said about every attention, and the command lines that say it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from cp_inductor import explain, parallelize
from cp_inductor.__main__ import main, size
from cp_inductor.inspect.explain import Report
from cp_inductor.plan import plan_attention
from tests.examples_of_models import attend, mixed
from tests.support.plans import make_plan
from tests.support.ranks import fake_mesh, fake_rank

HERE = "tests.examples_of_models"


def explained(model: object, rank: int = 1, world_size: int = 4, **kwargs: object) -> Report:
    with fake_mesh(rank, world_size) as mesh:
        tensor = torch.zeros(2, 4, 64, 32, dtype=torch.bfloat16)
        return explain(model, tensor, tensor, tensor, mesh=mesh, **kwargs)


class TextTest(TestCase):
    def test_text(self) -> None:
        self.assertExpectedInline(
            str(explained(mixed)),
            """\
2 attentions: 1 rewritten, 1 refused, 0 not sharded
sdpa_0 (examples_of_models.py:15)  rewritten
  mesh       axis 'cp', rank 1 of 4
  attention  causal, batch 2, 256 queries, 256 keys,
             4 heads, 4 of keys, head dim 32, bfloat16
  kernel     flash_cpu: SDPA's first choice
  plan       heads, 1 stage
  forward    2 collectives, 1 tile of 4, 49.8% of pairs skipped, 0.00842 GFLOP, balance 1.000,
             0.0998 MB received, 0.0998 at most, 0.041 of 0.046 ms exposed
  backward   2 collectives, 1 tile of 4, 49.8% of pairs skipped, 0.0211 GFLOP, balance 1.000,
             0.101 MB received, 0.101 at most, 0.041 of 0.046 ms exposed
sdpa_1 (examples_of_models.py:17)  refused
  error      UnsupportedAttention
  expected   attn_mask=None over plain shards on axis 'cp'
  got        an attn_mask of shape (64, 64)
  remedy     use is_causal=True if it says no more, else flex_attention, or DTensors (any mask)""",
        )


def test_what_is_said_is_what_the_plan_says() -> None:
    report = explained(attend, options={"strategy": "ring"})
    assert report.is_fine
    (attention,) = report.attentions
    plan = make_plan(4, 64, 4, head_dim=32, strategy="ring")
    forward, backward = attention.forward, attention.backward
    assert forward is not None and backward is not None
    assert (forward.collectives, backward.collectives) == (3, 6)
    assert forward.tiles == 2
    assert forward.tiles_of_all_ranks == 1 + 2 + 3 + 4
    assert forward.skipped == pytest.approx(0.5 * 255 / 256)
    assert forward.bytes_sent == 2 * plan.bytes_sent(1)
    assert backward.bytes_received == 2 * plan.backward().bytes_received(1)
    assert forward.balance == pytest.approx(plan.balance)
    # 1.5 causal squares of 64 tokens, two matmuls, 4 heads, a batch of two.
    assert forward.flops == 2 * 4 * 4 * 32 * (64 * 64 + 64 * 65 // 2)


def test_every_verdict_is_data() -> None:
    report = explained(mixed)
    assert not report.is_fine
    data = json.loads(json.dumps(report.to_dict()))
    assert [attention["verdict"] for attention in data["attentions"]] == ["rewritten", "refused"]
    refusal = data["attentions"][1]["refusal"]
    assert refusal["error"] == "UnsupportedAttention"
    assert refusal["remedy"].startswith("use is_causal=True")
    with fake_rank(0, 2):
        tensor = torch.zeros(1, 2, 8, 8)
        local = explain(attend, tensor, tensor, tensor)
    assert [attention.verdict for attention in local.attentions] == ["not sharded"]


def test_multi_head_attention_is_seen_through(mesh: DeviceMesh) -> None:
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def model(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return layer(x, y, z, need_weights=False)[0] + layer(x, y, z)[0]

    x = torch.zeros(1, 8, 16)
    report = explain(model, x, x, x, mesh=mesh)
    assert [attention.verdict for attention in report.attentions] == ["refused"]
    assert "need_weights=False" in str(report)


def test_layers_of_an_encoder_are_named(mesh: DeviceMesh) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 8, 0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    parallelize(model, mesh)
    report = explain(model, distribute_tensor(torch.zeros(1, 8, 16), mesh, [Shard(1)]))
    sites = [attention.site for attention in report.attentions]
    assert report.headline.startswith("2 attentions: 2 rewritten")
    assert all(f", layers.{n}.self_attn)" in site for n, site in enumerate(sites)), sites


def test_graph_breaks_are_said() -> None:
    def model(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return F.scaled_dot_product_attention(x, y, z)

    report = explained(model)
    assert not report.is_fine
    assert "graph_break" in report.graph_break
    assert "not captured whole" in str(report)


def test_nothing_is_run_or_counted(mesh: DeviceMesh) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            return attend(x, y, z) + 1

    x = torch.zeros(1, 2, 8, 8)
    torch._dynamo.utils.counters["cp_inductor"]["sites_found"] = 7
    assert explain(Model(), x, x, x, mesh=mesh).is_fine
    assert torch._dynamo.utils.counters["cp_inductor"] == {"sites_found": 7}
    assert not torch._dynamo.utils.counters["stats"]


# --- Command lines ----------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("name", ["plain", "distributed"])
def test_explain_command(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, _ = run(capsys, "explain", f"{HERE}:{name}", "--world-size", 4, "--rank", 2)
    assert code == 0
    assert "rank 2 of 4" in out and "cudnn_cuda" in out
    assert ("allgather" in out) == (name == "distributed")
    wanted = ("--world-size", 64, "--rank", 17, "--strategy", "rows", "--json")
    code, out, _ = run(capsys, "explain", f"{HERE}:plain", *wanted)
    assert json.loads(out)["attentions"][0]["facts"]["strategy"] == "rows"


def test_explain_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", f"{HERE}:refused", "--world-size", 4)
    assert code == 1
    assert "1 rewritten, 1 refused" in out


@pytest.mark.slow
def test_code_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("triton")
    world = ("--world-size", 4, "--rank", 3)
    code, out, _ = run(capsys, "code", f"{HERE}:plain", *world, "--graph", "backward")
    assert code == 0
    assert "# === backward, rank 3: tiles: " in out and "async_compile.triton(" in out
    assert "=== forward" not in out
    path = Path(__file__).parents[1] / "examples_of_models.py"
    files = ("--inference", "--target", "cpu", "--output", tmp_path)
    code, out, _ = run(capsys, "code", f"{path}:distributed", *world, *files)
    (written,) = tmp_path.iterdir()
    assert out.strip() == str(written) and "all_to_all_single" in written.read_text()
    code, out, _ = run(
        capsys, "code", f"{HERE}:plain", *world, "--kernels", "--inference", "--json"
    )
    kernels = json.loads(out)
    assert kernels and all(kernel["registers"] > 0 for kernel in kernels)


def test_code_command_on_two_axes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--world-size", 8, "--mesh-shape", "4,2", "--mesh-names", "tp,cp", "--rank", 3)
    code, out, _ = run(capsys, "explain", f"{HERE}:plain", *words)
    assert code == 0
    assert "axis 'cp', rank 1 of 2" in out


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0, out
    assert "private names are as expected" in out
    _, listed, _ = run(capsys, "doctor", "--patches")
    assert "register_dtensor_handler" in listed and "register_dtensor_handler" not in out
    code, out, _ = run(capsys, "doctor", "--json")
    checks = {check["name"]: check for check in json.loads(out)}
    assert checks["backends"]["state"] == "ok"
    assert {"torch", "triton", "cache", "process group", "devices"} <= set(checks)


def test_doctor_finds_what_moved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("torch._inductor.graph.GraphLowering.compile_to_module")
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm: None)
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "GraphLowering.compile_to_module: it is gone" in out
    assert "compile_fx: it no longer takes inner_compile" in out


# --- python -m cp_inductor.

SIZES = ("plan", "--world-size", "4", "--seq-len", "8192", "--heads", "8", "--head-dim", "64")


def test_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIZES, "--strategy", "blocks", "--stages", "2", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["strategy"] == "blocks"
    assert summary["flops, busiest / mean"] <= 1.02
    assert summary["forward exchanges"] >= 3


def test_verbose_prints_the_plan_and_its_backward(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIZES, "--strategy", "rows", "--verbose"]) == 0
    plan = plan_attention(seq_len=8192, world_size=4, num_heads=8, head_dim=64, strategy="rows")
    assert f"{plan}\n{plan.backward()}" in capsys.readouterr().out


def test_a_refusal_is_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIZES, "--strategy", "heads3+blocks"]) == 1
    assert "UnsupportedStrategy" in capsys.readouterr().err


def test_a_wrong_call_is_another() -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plan"])
    assert exit_.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*SIZES, "--rank", "99"), "expected --rank to be an integer from 0 to 3, got 99"),
        ((*SIZES, "--rank", "-1"), "got -1"),
        (("plan", "--world-size", "0", "--seq-len", "8"), "--world-size to be an integer from 1"),
        ((*SIZES, "--mask", "foo("), "InvalidText: the mask 'foo(': "),
        ((*SIZES, "--mask", "k <= q)"), "unmatched ')'"),
        ((*SIZES, "--kv-heads", "3"), "num_kv_heads that divides num_heads=8, got 3"),
        ((*SIZES, "--machine", "gpu:ib400[bytes_per_s=nan]"), "bytes_per_s to be a finite number"),
        ((*SIZES, "--machine", "gpu[flops_per_s=0]:ib400"), "flops_per_s to be a finite number"),
        ((*SIZES, "--stages", "-1"), "stages to be an integer from 0"),
        (("explain", "nowhere:x", "--world-size", "2", "--rank", "2"), "--rank"),
        (("code", "nowhere:x", "--world-size", "-2"), "--world-size"),
        (("estimate", "x:x", "--world-size", "2", "--optimizer-states", "-1"), "optimizer_states"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert not said.out
    assert words in said.err and said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("estimate",), "cp-inductor[triton]"),
        (("code",), "cp-inductor[triton]"),
        (("explain", "--html", "page.html"), "cp-inductor[draw]"),
    ],
)
def test_what_is_not_installed_is_said_before_the_model_is_made(
    arguments: tuple[str, ...],
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in ("compile_for", "page"):
        monkeypatch.setattr(f"cp_inductor.inspect.{module}.find_spec", lambda name: None)
    command, *rest = arguments
    assert main([command, "nowhere:build", "--world-size", "2", *rest]) > 0
    assert f"pip install '{remedy}'" in capsys.readouterr().err


def test_lengths_have_units_and_numbers_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert [size(text) for text in ("65536", "64k", "1M", "2K")] == [65536, 65536, 1 << 20, 2048]
    for text in ("64q", "k", ""):
        with pytest.raises(ValueError, match="invalid literal"):
            size(text)
    call = ["plan", "--world-size", "4", "--seq-len", "8k", "--strategy", "blocks"]
    assert main(call) == 0
    text = capsys.readouterr().out
    assert re.search(
        r"^forward received, most +[\d.]+ MiB  \(by the rank that receives most\)$", text, re.M
    )
    assert re.search(r"^backward predicted +[\d.]+ ms$", text, re.M)


def test_a_picture_is_drawn_or_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SIZES, "--draw", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    for path in (tmp_path / "nowhere" / "plan.png", tmp_path / "plan.gif"):
        assert main([*SIZES, "--draw", str(path)]) == 2
        assert path.name in capsys.readouterr().err


MODEL = """
import torch
import beside
import cp_inductor
from torch.distributed.tensor import Shard, distribute_tensor

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(9, 64), torch.nn.Embedding(64, 64)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        x = x.unflatten(-1, (4, 16)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

def build(mesh):
    ids = distribute_tensor(torch.zeros(1, 64, dtype=torch.long), mesh, [Shard(1)])
    return cp_inductor.parallelize(Model(), mesh), (ids,)

def broken(mesh):
    return [].pop()

def nonsense(mesh):
    return Model()

def wrong(mesh):
    return torch.nn.Linear(3, 3), (torch.zeros(1, 2),)
"""


@pytest.mark.slow
def test_a_model_that_makes_its_own_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whose file imports another one beside it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside.py").write_text("")
    path = tmp_path / "model_of_positions.py"
    path.write_text(MODEL)
    rest = ("--world-size", "4", "--target", "cpu")
    assert main(["explain", f"{path}:build", *rest, "--json"]) == 0
    (attention,) = json.loads(capsys.readouterr().out)["attentions"]
    assert attention["verdict"] == "rewritten"
    assert main(["explain", f"{path}:broken", *rest]) == 1
    said = capsys.readouterr().err
    assert f"got IndexError: pop from empty list ({path}:22)" in said and said.count("\n") == 1
    assert main(["code", "nowhere_at_all:build", *rest]) == 1
    assert "No module named 'nowhere_at_all'" in capsys.readouterr().err
    for more, words in (
        (("missing",), "no attribute 'missing'"),
        (("nonsense",), r"\(model, args\)"),
        (("wrong",), "CannotLoad.*a model that runs on its arguments.*RuntimeError"),
        (("build", "--inference", "--graph", "backward"), "expected inference, the graphs that"),
        (("build", "--mesh-shape", "2,2", "--mesh-names", "a,a"), "none of them twice, got"),
        (("build", "--mesh-shape=-2,-2"), "a mesh of 4 ranks, got a mesh of -2 x -2"),
    ):
        assert main(["code", f"{path}:{more[0]}", *rest, *more[1:]]) > 0
        assert re.search(words, capsys.readouterr().err)
