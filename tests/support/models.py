"""Models of transformers, tiny and random: what README promises of each, and the table of it.

Each model computes its loss and gradients over a sequence of odd length, sharded over the ranks,
beside the same model on one process. `python -m tests.support.models` writes the list in
docs/hugging-face.md.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import TestCase
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import cp_inductor
from tests.support.combinations import assert_beside
from tests.support.pages import write_part
from tests.support.ranks import world_mesh

PAGE, SCRIPT = "hugging-face.md", "tests/support/models.py"
BATCH, LENGTH, VOCABULARY = 2, 33, 64
DOCUMENTS = (9, 13, 11)  # lengths, where documents are packed
TOLERANCE = 2e-5  # relative to the largest; experts compute in float32

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "attn_implementation": "sdpa",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPED_EXPERTS = {
    "n_routed_experts": 4,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LATENT = {
    **GROUPED_EXPERTS,
    "n_group": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

WINDOW = {"sliding_window": 12}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {**GROUPED_EXPERTS, "num_experts": 4, "n_group": 1, "head_dim": 8}

STATES = {"chunk_size": 8}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {
    **{**LINEAR, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
LINEAR_LATENT = {
    **{**LATENT, **LINEAR, "mlp_layer_types": ["dense", "sparse"]},
    **{"num_local_experts": 4, "n_group": 1},
}
SECTIONS = {
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        **{"partial_rotary_factor": 1.0, "mrope_interleaved": True},
    }
}
MAMBA = {"mamba_d_state": 8}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}

# What a language model within another model takes.
TEXT: Mapping[str, Any] = {
    name: size for name, size in SIZES.items() if name != "attn_implementation"
}
# The test computes their language model, over embeddings of text and of an image.
VISION_AND_TEXT = {
    "text_config": {
        **TEXT,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
    },
    "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48},
}

ENCODER_DECODER = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"decoder_start_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}

# 17 tokens: of 16 patches and the class
IMAGES = {"image_size": 16, "patch_size": 4}
NO_DROPOUT = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

IMAGE_TOKEN, IMAGE_TOKENS = 2, 16

# The name before ForCausalLM, or the model's whole name, and what its configuration takes besides
# SIZES.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 12},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Olmo2": {},
    "Phi3": {},
    "Granite": {},
    "Glm4": {"head_dim": 8},
    "Starcoder2": {"sliding_window": None},
    "Gemma": {"head_dim": 8},
    "Cohere": {},
    "Mixtral": LOCAL_EXPERTS,
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {**EXPERTS, "head_dim": 8},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": LATENT,
    "SmolLM3": {},
    "Exaone4": {**WINDOW, "sliding_window_pattern": 2},
    "StableLm": {},
    "JetMoe": {**LOCAL_EXPERTS, "kv_channels": 8},
    "Olmo": {},
    "Olmo3": WINDOW,
    "Cohere2": WINDOW,
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "DeepseekV2": LATENT,
    "Glm4Moe": ROUTED,
    "Ministral": {**WINDOW, "head_dim": 8},
    "GraniteMoe": LOCAL_EXPERTS,
    "Phi": {},
    "Persimmon": {},
    "Nemotron": {},
    "Helium": {"head_dim": 8},
    "Glm": {"head_dim": 8},
    "Arcee": {},
    "Apertus": {},
    "HunYuanDenseV1": {"head_dim": 8},
    "Ernie4_5": {},
    "BitNet": {},
    "GPTBigCode": {"n_inner": 48, **NO_DROPOUT},
    "FlexOlmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "Llama4": {
        **{"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
        **{"intermediate_size_mlp": 48, "head_dim": 8, "attention_chunk_size": 11},
        # Without rotations queries grow with their positions: at 8, 16, ..., instead of 8,192.
        **{"no_rope_layers": [1, 0], "floor_scale": 8, "attn_scale": 0.3},
    },
    "Gemma3": {**WINDOW, "head_dim": 8},
    "Falcon": {
        **{"new_decoder_architecture": True, "num_kv_heads": 2},
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0},
    },
    "SeedOss": {"head_dim": 8, "residual_dropout": 0.0, "attention_dropout": 0.0},
    "Phimoe": {**LOCAL_EXPERTS, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "Dots1": ROUTED,
    "HunYuanMoEV1": {**EXPERTS, "head_dim": 8, "moe_topk": 2},
    "Ernie4_5_Moe": {
        **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
        **{"moe_layer_start_index": 0, "moe_num_shared_experts": 1},
    },
    "Mamba": {"state_size": 8, "attn_implementation": None},
    "Mamba2": {
        "attn_implementation": None,
        **STATES,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
    },
    "Jamba": {**MAMBA, **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1},
    "Bamba": {**MAMBA, **MAMBA2, "attn_layer_indices": [1]},
    "Zamba": {
        **{**MAMBA, "layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3},
        **{"num_key_value_heads": 4},
    },
    "Zamba2": {
        **{"layers_block_type": ["mamba", "hybrid"], "num_key_value_heads": 4},
        **{"mamba_d_state": 8, "n_mamba_heads": 8, "chunk_size": 8},
    },
    "Qwen3Next": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 16},
    "Qwen3_5": {**DELTA, **SECTIONS},
    "Qwen3_5Moe": {**EXPERTS, **DELTA, **SECTIONS, "shared_expert_intermediate_size": 16},
    "KimiLinear": {
        **{**LINEAR_LATENT, "q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 4}
    },
    "BailingHybrid": {**LINEAR_LATENT, "head_dim": 8},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Lfm2Moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "FalconMamba": {"state_size": 8, "attn_implementation": None},
    "FalconH1": {**MAMBA2, "mamba_d_state": 8, "mamba_d_ssm": 64},
    "NemotronH": {
        **STATES,
        **{"layers_block_type": ["mamba", "attention"], "head_dim": 8, "ssm_state_size": 8},
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2},
    },
    "GraniteMoeHybrid": {
        **{**MAMBA2, **LOCAL_EXPERTS, "layer_types": ["mamba", "attention"], "mamba_d_state": 8},
        **{"shared_intermediate_size": 16},
    },
    "RecurrentGemma": {"block_types": ("recurrent", "attention"), "attention_window_size": 12},
    "MiniMax": {**LOCAL_EXPERTS, **LINEAR, "head_dim": 8, "block_size": 8},
    "OlmoHybrid": LINEAR,
    "Doge": {},
    "Gemma2": {**WINDOW, "head_dim": 8, "attn_implementation": "flex_attention"},
    "GptOss": {
        **{**WINDOW, **LOCAL_EXPERTS, "head_dim": 8, "attn_implementation": "flex_attention"},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "GPT2LMHeadModel": {
        **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
        **NO_DROPOUT,
    },
    "Qwen2VLForConditionalGeneration": VISION_AND_TEXT,
    "Qwen2_5_VLForConditionalGeneration": VISION_AND_TEXT,
    "BertForMaskedLM": STILL,
    "RobertaForMaskedLM": STILL,
    "ElectraForMaskedLM": {**STILL, "embedding_size": 32},
    "DistilBertForMaskedLM": {
        **{"dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 2},
        **{"dropout": 0.0, "attention_dropout": 0.0},
    },
    "ModernBertForMaskedLM": {"local_attention": 12, "global_attn_every_n_layers": 2},
    "XLMRobertaForMaskedLM": STILL,
    "CamembertForMaskedLM": STILL,
    "T5ForConditionalGeneration": {
        **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        **{"dropout_rate": 0.0, "decoder_start_token_id": 0},
    },
    "BartForConditionalGeneration": ENCODER_DECODER,
    "WhisperForConditionalGeneration": {
        **{**ENCODER_DECODER, "num_mel_bins": 8},
        **{"max_source_positions": 17, "max_target_positions": 40},
    },
    # Each 16 tokens of an image among those of the text.
    "LlavaForConditionalGeneration": {
        "image_token_index": IMAGE_TOKEN,
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**TEXT, **IMAGES, "model_type": "clip_vision_model"},
    },
    "LlamaForSequenceClassification": {"num_labels": 3},
    "Rwkv": {"attention_hidden_size": 32, "attn_implementation": "eager"},
    "ViTModel": {**IMAGES, **STILL},
    "SiglipVisionModel": {**IMAGES, "image_size": 20},
    "CLIPVisionModel": IMAGES,
    "Dinov2Model": {**IMAGES, **STILL},
    "BeitModel": {**IMAGES, **STILL, "drop_path_rate": 0.0},
    "DeiTModel": {**IMAGES, **STILL, "image_size": 20},
}

# How many attentions there are, where not one in each layer, nor in a hybrid, one behind a layer of
# a state-space model or the like.
SITES = {
    **dict.fromkeys(("Mamba", "Mamba2", "FalconMamba", "Rwkv"), 0),
    "LlavaForConditionalGeneration": 4,  # two of the image
    "Zamba": 2,
    # Decoders attend to themselves and to the encoder's.
    **dict.fromkeys((f"{name}ForConditionalGeneration" for name in ("T5", "Bart", "Whisper")), 6),
}

# Whose layers are all alike, and of which one is computed.
ALIKE = {
    *("Qwen2", "Qwen3", "Olmo2", "Phi3", "Granite", "Glm4", "Starcoder2", "Gemma", "Cohere"),
    *("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "SmolLM3", "StableLm", "JetMoe", "Olmo"),
    *("GPTNeoX", "OPT", "GraniteMoe", "Phi", "Persimmon", "Nemotron", "Helium", "Glm", "Arcee"),
    *("Apertus", "HunYuanDenseV1", "Ernie4_5", "BitNet", "GPTBigCode", "FlexOlmo", "Falcon"),
    *("SeedOss", "Phimoe", "HunYuanMoEV1", "Ernie4_5_Moe", "Doge", "Mamba", "Mamba2"),
    *("FalconMamba", "FalconH1"),
}

# Modules of models for images that make the tokens, each on every rank: `parallelize(whole=)`.
BEGINNINGS = {
    *("ViTEmbeddings", "SiglipVisionEmbeddings", "CLIPVisionEmbeddings", "Dinov2Embeddings"),
    *("BeitEmbeddings", "DeiTEmbeddings"),
    "MultiheadAttention",  # of one token, in which SigLIP pools all others
}

# Whose mixers run on each rank's own tokens; those of RWKV, on all tokens.
HYBRIDS = {
    *("Mamba", "Mamba2", "Jamba", "Bamba", "Zamba", "Zamba2", "Qwen3Next", "Lfm2", "FalconH1"),
    *("NemotronH", "GraniteMoeHybrid", "RecurrentGemma", "MiniMax", "OlmoHybrid"),
    *("Qwen3_5", "Qwen3_5Moe", "KimiLinear", "BailingHybrid", "Lfm2Moe", "FalconMamba"),
}

# In these, transformers attends from one packed document to another, on one process as well.
# State-space layers and the like, as transformers computes them on the CPU, know no documents.
MIXED = {*("OPT", "Falcon", "GptOss", "Rwkv"), *HYBRIDS}


# Of packed documents: queries that grow do so with their place in the row, in transformers as well.
OF_PACKED: Mapping[str, Any] = {"Llama4": {"attn_temperature_tuning": False}}

# What masks are read as, by how a model is called: "" as it is, "packed", or "padded".
MASKS: Mapping[tuple[str, str], set[str]] = {
    ("Llama", ""): {"causal"},
    ("Llama", "packed"): {"causal, document equality"},
    ("Mistral", ""): {"causal, window 12"},
    ("Mistral", "padded"): {"causal, key padding, window 12"},
    ("Gemma2", ""): {
        *("causal, score 50*Tanh(0.02*s)", "causal, window 12, score 50*Tanh(0.02*s)")
    },
    ("GptOss", ""): {"causal", "causal, window 12"},
    ("GPT2LMHeadModel", "padded"): {"causal, key padding"},
    ("BertForMaskedLM", "padded"): {"key padding"},
    ("BartForConditionalGeneration", "padded"): {"key padding", "causal"},
    ("T5ForConditionalGeneration", ""): {"full, bias", "causal, bias", "full"},
}
PADDED = [name for name, kind in MASKS if kind == "padded"]
# Those without experts and norms that compute in float32: in float64, all but their losses.
EXACT = {"Llama", "Mistral", *PADDED}
EXACT_TOLERANCE, LOSS_TOLERANCE = 1e-9, 1e-6


def is_whole_name(name: str) -> bool:
    """Whether a name is that of a class of transformers, not of a causal language model."""
    return "For" in name or name.endswith("Model")


def make(name: str, **more: Any) -> nn.Module:
    """Make a model with random weights, the same on every rank."""
    import transformers

    model = getattr(transformers, name if is_whole_name(name) else f"{name}ForCausalLM")
    torch.manual_seed(0)
    made: nn.Module = model(model.config_class(**{**SIZES, **MODELS[name], **more}))
    return made


def has_flex(name: str) -> bool:
    """Whether a model attends by flex_attention; all others do by SDPA."""
    return MODELS[name].get("attn_implementation") == "flex_attention"


def make_reference(name: str, **more: Any) -> nn.Module:
    """Make the same model for one process, where torch has no flex_attention with gradients."""
    return make(name, **more, **({"attn_implementation": "eager"} if has_flex(name) else {}))


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """Return what a model is given, whole."""
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "labels": ids}
    if type(model).__name__ == "LlavaForConditionalGeneration":
        ids[:, 5 : 5 + IMAGE_TOKENS] = IMAGE_TOKEN
        return {**inputs, "pixel_values": torch.randn(BATCH, 3, *[IMAGES["image_size"]] * 2)}
    if type(model).__name__.endswith("ForSequenceClassification"):
        ids[0, -4:] = 0  # is padded
        return {"input_ids": ids, "labels": torch.tensor([2, 0])}
    if "vision_config" in MODELS.get(type(model).__name__, {}):
        return of_text_and_image(ids)
    if model.main_input_name == "input_features":
        frames = 2 * model.config.max_source_positions  # the second convolution has a stride of 2
        features = torch.randn(BATCH, model.config.num_mel_bins, frames)
        return {"input_features": features, "labels": ids}
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(BATCH, 3, *[model.config.image_size] * 2)}
    return inputs


def of_text_and_image(ids: Tensor) -> dict[str, Tensor]:
    """Return embeddings, an image of 3 x 4 among them, and positions in time, height and width."""
    first, height, width = 7, 3, 4
    image = torch.cartesian_prod(torch.tensor([0]), torch.arange(height), torch.arange(width))
    rest = torch.arange(LENGTH - first - height * width) + first + width
    positions = torch.cat(
        [torch.arange(first).expand(3, -1), image.T + first, rest.expand(3, -1)], 1
    )
    embeds = torch.randn(BATCH, LENGTH, 32, generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[:, first : first + height * width] = -100
    return {
        "inputs_embeds": embeds,
        "position_ids": positions[:, None].repeat(1, BATCH, 1),
        "labels": labels,
    }


def loss_of(model: Any, inputs: Mapping[str, Tensor], **keywords: Any) -> Tensor:
    """Return the model's own loss, or a mean over what it makes of an image."""
    result = model(**inputs, **keywords)
    if "labels" in inputs:
        loss: Tensor = result.loss
        return loss
    tokens: Tensor = result.last_hidden_state
    loss = tokens.square().sum() / tokens.numel()
    return loss if result.pooler_output is None else loss + result.pooler_output.square().mean()


def packed_inputs() -> dict[str, Tensor]:
    """Return documents one behind the other, as DataCollatorWithFlattening of transformers does."""
    ids = torch.randint(3, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def padded_inputs(model: nn.Module) -> dict[str, Tensor]:
    """Return a batch whose first sequence ends before the second."""
    inputs = inputs_of(model)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, -5:] = 0
    return {
        **inputs,
        "attention_mask": mask,
        "labels": inputs["labels"].masked_fill(mask == 0, -100),
    }


def tells_apart(model: nn.Module, inputs: Mapping[str, Tensor]) -> bool:
    """Whether transformers itself attends within documents: the last alone has the same logits."""
    last = DOCUMENTS[-1]
    with torch.no_grad():
        packed = model(**inputs, use_cache=False).logits[:, -last:]
        alone = model(inputs["input_ids"][:, -last:], use_cache=False).logits
    return bool((packed - alone).abs().max() <= TOLERANCE * alone.abs().max())


def check(name: str, kind: str = "") -> None:
    """Compare a model over a sharded sequence with itself on one process.

    Args:
        name: of the table.
        kind: "packed" for documents one behind the other, "padded" for sequences that end early.

    Raises:
        AssertionError: loss, gradients or masks differ.
    """
    from cp_inductor.integrations.sinks import flex_sinks_on_cpu

    layers = {"num_hidden_layers": 1} if name in ALIKE else {}
    sizes = {**layers, **(OF_PACKED.get(name, {}) if kind == "packed" else {})}
    model, reference = make(name, **sizes), make_reference(name, **sizes)
    tolerance, of_loss = TOLERANCE, TOLERANCE
    if name in EXACT:
        model, reference = model.double(), reference.double()
        tolerance, of_loss = EXACT_TOLERANCE, LOSS_TOLERANCE
    if kind == "packed":
        inputs = packed_inputs()
        assert tells_apart(reference, inputs)
    else:
        inputs = padded_inputs(model) if kind == "padded" else inputs_of(model)
    # Without a cache, transformers reads the documents from their positions. With one, it asks an
    # empty cache for its dtype when it makes a mask for flex_attention.
    keywords = {"use_cache": False} if kind == "packed" or has_flex(name) else {}
    expected = loss_of(reference, inputs, **keywords)
    expected.backward()

    mesh = world_mesh()
    begin = [type(module) for module in model.modules() if type(module).__name__ in BEGINNINGS]
    dims = {"input_features": 2}  # (B, F, T) of Whisper
    cp_inductor.parallelize(model, mesh, whole=begin, outputs="whole", seq_dims=dims)
    compiled = torch.compile(model, backend="cp_aot_eager", fullgraph=True)
    with (
        flex_sinks_on_cpu(),
        _nothing_on_whole() if name in HYBRIDS else nullcontext(),
        # transformers makes a BlockMask with an option that torch warns of.
        torch._dynamo.config.patch(ignore_logging_functions={warnings.warn}),
        TestCase().assertLogs("cp_inductor", logging.INFO) as log,
    ):
        loss = loss_of(compiled, inputs, **keywords)
        loss.backward()
    num_sites = SITES.get(name, 1 if layers or name in HYBRIDS else 2)
    assert torch._dynamo.utils.counters["cp_inductor"]["sites_rewritten"] == num_sites
    masks = {one[0] for line in log.output if (one := re.findall(r"\): (.*) on axis 'cp'", line))}
    assert masks == MASKS.get((name, kind), masks)
    assert abs(loss.item() - expected.item()) <= of_loss * expected.item(), "the loss differs"
    assert not any(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
    assert_beside(model, reference, tolerance=tolerance, least=1e-3)


def _nothing_on_whole() -> AbstractContextManager[Any]:
    """Return a context in which no module may compute the whole sequence."""

    def refuse(leaf: Any) -> Any:
        raise AssertionError("a mixer gathers the whole sequence")

    return patch("cp_inductor.modules.mixers.gathered", refuse)


# What is said of a model whose loss and gradients are right, by what becomes of packed documents.
VERDICTS = {
    "yes": "Right, packed as well",
    "mixed": "Right; transformers itself attends from one packed document to another",
    "": "Right; not packed",
}


def verdicts() -> list[str]:
    """Return the list in docs/hugging-face.md, which test_models.py holds: models by verdict."""
    by_verdict: dict[str, list[str]] = {}
    for name in MODELS:
        packed = "mixed" if name in MIXED else "yes" if not is_whole_name(name) else ""
        by_verdict.setdefault(VERDICTS[packed], []).append(name)
    return [f"* **{said}.** {', '.join(names)}" for said, names in by_verdict.items()]


if __name__ == "__main__":
    write_part(PAGE, SCRIPT, verdicts())
