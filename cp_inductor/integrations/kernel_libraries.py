"""The recurrences of libraries of kernels, by name: fla, mamba_ssm and causal_conv1d.

None of them is imported. Their signatures are those of fla 0.4, mamba_ssm 2.2 and causal_conv1d
1.5, with whose stand-ins the forms are tested: they need a GPU.
"""

from cp_inductor.modules.recurrences import (
    refuse_steps,
    register_package,
    share_chunk_scan,
    share_keyed,
    share_selective_scan,
    share_short_convolution,
)

# fla has two of each: one computes in chunks, the other goes from token to token.
KEYED = (
    "gated_delta_rule",
    "kda",
    "delta_rule",
    "gla",
    "simple_gla",
    "lightning_attn",
    "retention",
)


def register_kernel_libraries() -> None:
    """Let modules that call these libraries be named in `parallelize(..., recurrent=)`."""
    kinds = ("chunk", "fused_recurrent")
    register_package("fla", {f"{kind}_{name}": share_keyed for name in KEYED for kind in kinds})
    register_package(
        "mamba_ssm",
        {
            "mamba_chunk_scan_combined": share_chunk_scan,
            "selective_scan_fn": share_selective_scan,
            "selective_state_update": refuse_steps,
        },
    )
    register_package(
        "causal_conv1d",
        {"causal_conv1d_fn": share_short_convolution, "causal_conv1d_update": refuse_steps},
    )
