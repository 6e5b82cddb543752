"""Prefix trees: rows of them, and models of transformers over them, beside unpacked rows."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from cp_inductor import (
    InvalidArgument,
    UnsupportedAttention,
    accept_prefix_trees,
    distribute,
    pack_prefix_trees,
    pad_packed,
    token_logprobs,
)
from tests.support.models import make
from tests.support.ranks import run_ranks, world_mesh
from tests.support.trees import draw_trees, places_of_rows, unpacked, unpacked_batch

pytest.importorskip("transformers")

from cp_inductor.integrations.transformers_trees import MODELS

# --- Rows ---------------------------------------------------------------------------------------


def test_the_last_token_of_a_prompt_heads_every_branch() -> None:
    batch = pack_prefix_trees([([1, 2, 3], [[4, 5], [6]]), ([7, 8], [[9]])])
    found = {name: tensor.tolist() for name, tensor in batch.items()}
    assert found == {
        "input_ids": [[1, 2, 3, 4, 5, 3, 6, 7, 8, 9]],
        "position_ids": [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2]],
        "attention_mask": [[[[7, 7, 5, 5, 5, 7, 7, 10, 10, 10], [0, 1, 2, 3, 4, 2, 3, 0, 1, 2]]]],
        "labels": [[-100, -100, -100, 4, 5, -100, 6, -100, -100, 9]],
        "weights": [[2, 2, 2, 1, 1, 0, 1, 1, 1, 1]],
        "spans": [[0, 0, 0, 3], [0, 1, 3, 5], [0, 2, 6, 7], [1, 0, 7, 9], [1, 1, 9, 10]],
    }


TREES = (
    [([1, 2], []), [3]],
    [([], [[4, 5], [6]])],  # without a prompt
    [([1], [[], [2], ([], [[3], ([4], [[5], [6, 7]])])])],  # answers without tokens
)


@pytest.mark.parametrize("trees", [*TREES, *(draw_trees(seed, 200) for seed in range(30))])
def test_each_answer_sees_its_unpacked_row(trees: list[Any]) -> None:
    batch = pack_prefix_trees(trees)
    ids, positions = batch["input_ids"][0], batch["position_ids"][0]
    rows = unpacked(trees)
    places = places_of_rows(batch)
    assert [ids[row].tolist() for row in places] == [tokens for tokens, _ in rows]
    assert all(positions[row].tolist() == [*range(len(row))] for row in places)
    # Each token that has a label is predicted by the one before it, on every row that it is in.
    labels, weights = batch["labels"][0], batch["weights"][0]
    counted = [at for at in range(len(ids)) if labels[at] != -100]
    assert all(row[row.index(at) - 1] == at - 1 for row in places for at in counted if at in row)
    assert weights.sum() == sum(len(tokens) for tokens, _ in rows)
    total = sum(float(weights[at]) for at in counted)
    assert total == sum(one != -100 for _, of_row in rows for one in of_row)


def test_a_tree_may_be_deep_and_wide() -> None:
    tree: Any = [1]
    for _ in range(3000):
        tree = ([2], [tree, [3]])
    batch = pack_prefix_trees([tree, ([4] * 500, [[5]] * 1000)])
    assert len(batch["spans"]) == 6001 + 1001
    assert batch["input_ids"].shape[1] == 3 * 3000 + 499 + 2000 + 1
    assert batch["weights"][0, -2400] == 1000


@pytest.mark.parametrize(
    ("trees", "said"),
    [
        ([], "at least one token"),
        ([([], [[]])], "at least one token"),
        ([["a"]], "node 0 of tree 0"),
        ([([1], [[2, -100]])], "-100 and the like are no ids"),
        ([([1], [([2], [], [1, 0])])], "2 counts of 1 tokens"),
        ([([1], [([2], [], None)])], "a list of counts, got NoneType"),
        ([([1, 2], [3, 4])], "node 1 of tree 0.*children are a list of nodes"),
        (([1, 2], [[3]]), r"node 0 of tree 1.*got list \[\[3\]\]"),
        ([([1], None)], r"got NoneType None; give \[\]"),
        ([(torch.tensor(1), [[2]])], "whole numbers, got tuple"),
        ([([1], [[2.5]])], r"whole numbers, got list \[2.5\]"),
        (None, "a list of trees"),
        ([([1], [[64]])], "node 1 of tree 0: expected ids from 0 to 63, got 64"),
    ],
)
def test_what_is_no_tree_is_refused(trees: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        pack_prefix_trees(trees, vocab_size=64)


def test_padding_is_trees_of_one_token() -> None:
    batch = pack_prefix_trees([([1, 2, 3], [[4, 5], [6]])])
    padded = pad_packed(batch, 9)
    assert padded["attention_mask"][0, 0].tolist() == [
        [7, 7, 5, 5, 5, 7, 7, 8, 9],
        [0, 1, 2, 3, 4, 2, 3, 0, 0],
    ]
    assert padded["labels"].tolist()[0][7:] == [-100, -100]
    assert padded["weights"].tolist()[0][7:] == [0, 0]
    assert padded["spans"] is batch["spans"]


# --- Models on one process ----------------------------------------------------------------------

NAMES = {
    **{"llama": "Llama", "mistral": "Mistral", "mixtral": "Mixtral", "qwen2": "Qwen2"},
    **{"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "gemma3_text": "Gemma3", "gpt_oss": "GptOss"},
    **{"olmo2": "Olmo2", "phi3": "Phi3", "smollm3": "SmolLM3"},
}
# Layers with and without windows, of fewer tokens than a row has.
SIZES = {
    "gemma3_text": {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]},
    "mistral": {"sliding_window": 6},
    "gpt_oss": {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]},
}
INPUTS = ("input_ids", "position_ids", "attention_mask")


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "gpt_oss"])
def test_branches_have_the_logits_of_unpacked_rows(kind: str) -> None:
    model = make(NAMES[kind], **SIZES.get(kind, {})).eval()
    assert model.config.model_type == kind
    trees = draw_trees(1, 120)
    batch, rows = pack_prefix_trees(trees), unpacked(trees)
    with torch.no_grad():
        expected = [model(input_ids=torch.tensor([ids])).logits[0] for ids, _ in rows]
        accept_prefix_trees(model)
        logits = model(**{name: batch[name] for name in INPUTS}).logits[0]
        again = model(input_ids=torch.tensor([rows[0][0]])).logits[0]
    for row, of_row in zip(places_of_rows(batch), expected, strict=True):
        assert (logits[row] - of_row).abs().max() <= 1e-5 * of_row.abs().max()
    assert (again - expected[0]).abs().max() <= 1e-6  # what is no tree, it computes as before


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("Jamba", {}, "mamba"),
        ("Qwen3Next", {}, "linear_attn"),
        ("Llama", {"attn_implementation": "eager"}, "got 'eager'"),
        ("GPT2LMHeadModel", {}, "got 'gpt2'"),
    ],
)
def test_models_that_cannot_branch_are_refused(name: str, more: Any, said: str) -> None:
    with pytest.raises(UnsupportedAttention, match=said):
        accept_prefix_trees(make(name, **more))


def test_a_batch_that_a_model_was_not_prepared_for_is_refused() -> None:
    batch = pack_prefix_trees([([1, 2, 3], [[4, 5], [6]])])
    inputs = {name: batch[name] for name in INPUTS}
    model = make("Llama")
    with pytest.raises(RuntimeError):  # by torch
        model(**inputs)
    accept_prefix_trees(model)
    longer = {**inputs, "attention_mask": inputs["attention_mask"][..., 1:]}
    with pytest.raises(InvalidArgument, match="tables of a tree"):
        model(**longer)
    model.config.sliding_window = 4  # which Llama's layers do not pass
    with pytest.raises(UnsupportedAttention, match="the window of the layer, 4"):
        model(**inputs)


# --- Over ranks -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_trees_train_as_unpacked_rows_do() -> None:
    for graphs, worst in run_ranks(2, train, "llama", range(3), 96, 1):
        assert graphs == 1  # one for all trees
        assert worst <= 1e-6  # norms of transformers compute in float32


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_many_trees(kind: str, world_size: int) -> None:
    seeds = range(25 * world_size, 25 * (world_size + 1))
    for graphs, worst in run_ranks(world_size, train, kind, seeds, 240, 2):
        assert graphs == 1
        assert worst <= 1e-6  # norms of transformers compute in float32


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
def test_trees_with_sinks(world_size: int) -> None:
    for graphs, worst in run_ranks(world_size, train, "gpt_oss", range(5), 240, 2):
        assert graphs == 1
        assert worst <= 2e-5  # experts compute in float32


@pytest.mark.long
def test_trees_in_bfloat16() -> None:
    for graphs, worst in run_ranks(2, train, "llama", range(5), 240, 2, torch.bfloat16):
        assert graphs == 1
        assert worst <= 2**-4  # some roundings of 2**-8, of sums that are long


@pytest.mark.long
@pytest.mark.parametrize(
    "trees",
    [[([5] * 300, [[6], [7, 8]])], [([5] * 20, [[6, 7, 8]] * 1000)], [([5] * 99, [[9]] * 3)]],
    ids=["a prompt longer than shards", "a thousand answers", "answers of one token"],
)
def test_trees_of_odd_shapes(trees: list[Any]) -> None:
    for _, worst in run_ranks(2, train_on, "llama", [trees], None, 1):
        assert worst <= 1e-6  # norms of transformers compute in float32


def train(
    kind: str, seeds: range, length: int, layers: int, dtype: torch.dtype = torch.float64
) -> tuple[int, float]:
    trees = [draw_trees(seed, length) for seed in seeds]
    return train_on(kind, trees, length, layers, dtype)


def train_on(
    kind: str,
    batches: list[list[Any]],
    length: int | None,
    layers: int,
    dtype: torch.dtype = torch.float64,
) -> tuple[int, float]:
    """Return how many graphs there are, and the largest relative error of losses and gradients."""
    from cp_inductor.integrations.sinks import flex_sinks_on_cpu

    more = {**SIZES.get(kind, {}), "max_position_embeddings": 512}
    if layers == 1:
        more["num_hidden_layers"] = 1
    has_sinks = kind == "gpt_oss"
    dtype = torch.float32 if has_sinks else dtype
    model = make(NAMES[kind], **more).to(dtype)
    eager = {"attn_implementation": "eager"} if has_sinks else {}
    reference = make(NAMES[kind], **more, **eager)
    reference = reference.to(torch.float32 if has_sinks else torch.float64)
    reference.load_state_dict(model.state_dict())
    accept_prefix_trees(model)
    distribute(model, world_mesh())
    model.base_model.compile(backend="cp_aot_eager", fullgraph=True, dynamic=False)
    before, worst = counters["stats"]["unique_graphs"], 0.0
    for trees in batches:
        rows = unpacked_batch(trees)
        log_probs = token_logprobs(reference, **rows)
        expected = -log_probs.sum()
        expected.backward()
        packed = pack_prefix_trees(trees)
        places = places_of_rows(packed)
        packed = pad_packed(packed, length) if length else packed
        with (
            flex_sinks_on_cpu(),
            torch._dynamo.config.patch(ignore_logging_functions={warnings.warn}),
        ):
            ids, labels = packed["input_ids"], packed["labels"]
            tables = {name: packed[name] for name in INPUTS[1:]}
            found = token_logprobs(model, ids, labels, num_tokens=50, **tables)
            loss = -(found * packed["weights"]).sum()
            loss.backward()
        worst = max(worst, relative(loss, expected))
        for row, of_row in zip(places, log_probs, strict=True):
            here = found[0, row]
            is_first = packed["labels"][0, row] != -100  # not a copy, which has no label
            worst = max(worst, relative(here[is_first], of_row[: len(row)][is_first]))
        for (path, p), (_, q) in zip(
            model.named_parameters(), reference.named_parameters(), strict=True
        ):
            assert (p.grad is None) == (q.grad is None), path
            if p.grad is not None and q.grad is not None:
                assert isinstance(p.grad, DTensor)
                worst = max(worst, relative(p.grad.full_tensor(), q.grad))
        model.zero_grad()
        reference.zero_grad()
    return counters["stats"]["unique_graphs"] - before, worst


def relative(found: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    scale = max(float(expected.detach().abs().max()), 1e-3)
    return float((found - expected).detach().abs().max()) / scale


# --- Log-probabilities ----------------------------------------------------------------------------


def test_log_probabilities_are_those_of_whole_logits() -> None:
    model = make("Gemma2", final_logit_softcapping=3.0, attn_implementation="eager")
    ids = torch.randint(3, 64, (2, 17), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 3:7] = labels[1, 0] = -100
    logits = model(ids).logits[:, :-1] / 0.7
    expected = logits.log_softmax(-1).gather(2, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    expected = expected * (labels[:, 1:] != -100)
    of_expected = torch.autograd.grad(expected.sum(), list(model.parameters()))
    found = token_logprobs(model, ids, labels, temperature=0.7, num_tokens=5)
    assert (found[:, 1:] - expected).abs().max() <= 1e-5
    assert not found[:, 0].any() and not found[0, 3:7].any()
    for one, other in zip(
        torch.autograd.grad(found.sum(), list(model.parameters())), of_expected, strict=True
    ):
        assert relative(one, other) <= 1e-5


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (torch.compile, "compiled below its head"),
        (lambda model: model.base_model, "no head"),
        (lambda model: setattr(model.config, "logit_scale", 2.0) or model, "logit_scale"),
    ],
)
def test_heads_that_cannot_be_taken_off_are_refused(wrap: Any, said: str) -> None:
    ids = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(InvalidArgument, match=said):
        token_logprobs(wrap(make("Llama")), ids, ids)
