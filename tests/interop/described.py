"""Tiny models of the families with a description, and of qwen2_moe, as transformers' configurations."""

import json
import pathlib

from tests.interop import make_golden
from tests.interop.make_golden import COMMON, VOCABULARY

LAYERS = 6
RECURRENT = ("mamba2", "qwen3_next", "granitemoehybrid", "nemotron_h")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "attention_factor": 1.2,
}
MSCALE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}


def configs(layers: int = LAYERS) -> dict:
    """A configuration of each family; `layers`: 3 or 6."""
    import transformers as t

    sizes = COMMON | {"num_hidden_layers": layers, "max_position_embeddings": 64}
    wide = sizes | {"head_dim": 8, "pad_token_id": None}
    mixed = ["sliding_attention", "full_attention", "sliding_attention"] * (layers // 3)
    odd = (["sliding_attention"] * 4 + ["full_attention", "sliding_attention"])[-layers:]
    experts = {"num_experts_per_tok": 2, "intermediate_size": 12}
    shared = {
        "moe_intermediate_size": 8,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "n_group": 3,
        "topk_group": 2,
        "first_k_dense_replace": layers // 3,
        "routed_scaling_factor": 1.5,
    }
    heads = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "kv_lora_rank": 12}
    latent = sizes | experts | heads | {"intermediate_size": 20, "num_key_value_heads": 4, "pad_token_id": None}
    return {
        "gemma": t.GemmaConfig(**wide),
        "gemma2": t.Gemma2Config(
            **wide,
            sliding_window=5,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=2.0,
        ),
        "gemma3_text": t.Gemma3TextConfig(
            **wide,
            sliding_window=5,
            layer_types=odd,
            query_pre_attn_scalar=8,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
                "sliding_attention": PLAIN,
            },
        ),
        "olmo2": t.Olmo2Config(**sizes, pad_token_id=None),
        "olmo3": t.Olmo3Config(
            **sizes,
            pad_token_id=None,
            sliding_window=5,
            layer_types=odd,
            rope_parameters={"full_attention": YARN, "sliding_attention": PLAIN},
        ),
        "phi3": t.Phi3Config(**sizes | {"sliding_window": 5, "pad_token_id": None, "partial_rotary_factor": 0.5}),
        "smollm3": t.SmolLM3Config(**sizes | {"pad_token_id": None}),
        "glm4": t.Glm4Config(**wide, partial_rotary_factor=0.5, tie_word_embeddings=False),
        "granite": t.GraniteConfig(
            **sizes,
            embedding_multiplier=3.0,
            logits_scaling=6.0,
            residual_multiplier=0.4,
            attention_multiplier=0.3,
        ),
        "cohere2": t.Cohere2Config(
            **sizes | {"sliding_window": 5, "logit_scale": 0.3, "pad_token_id": None, "layer_types": odd}
        ),
        "starcoder2": t.Starcoder2Config(**sizes, sliding_window=5),
        "ministral": t.MinistralConfig(**wide, sliding_window=5, layer_types=mixed),
        "glm4_moe": t.Glm4MoeConfig(
            **wide | experts | {"intermediate_size": 20, "pad_token_id": None},
            **shared,
            num_mtp_layers=0,
            attention_bias=True,
            use_qk_norm=True,
        ),
        "dots1": t.Dots1Config(
            **sizes | experts | {"intermediate_size": 20},
            **shared,
            attention_bias=True,
            norm_topk_prob=True,
            sliding_window=5,
            layer_types=mixed,
        ),
        "deepseek_v2": t.DeepseekV2Config(
            **latent,
            **shared,
            q_lora_rank=None,
            topk_method="group_limited_greedy",
            rope_parameters=PLAIN,
        ),
        "deepseek_v3": t.DeepseekV3Config(**latent, **shared, q_lora_rank=10, num_mtp_layers=0, rope_parameters=MSCALE),
        "ministral3": t.Ministral3Config(
            **wide, rope_parameters=YARN | {"original_max_position_embeddings": 6, "llama_4_scaling_beta": 0.5}
        ),
        "exaone4": t.Exaone4Config(**sizes, sliding_window=5, layer_types=odd),
        "seed_oss": t.SeedOssConfig(**wide),
        "nanochat": t.NanoChatConfig(**sizes, final_logit_softcapping=2.0, pad_token_id=None),
        "qwen2_moe": t.Qwen2MoeConfig(
            **sizes | experts,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=20,
            num_experts=4,
            norm_topk_prob=False,
            mlp_only_layers=[0, 4][: layers // 3],
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=2,
        ),
        "qwen3_next": t.Qwen3NextConfig(
            **wide | experts | {"intermediate_size": 20},
            full_attention_interval=3,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=20,
            num_experts=4,
            mlp_only_layers=[0, 4][: layers // 3],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=6,
            linear_value_head_dim=10,
        ),
        "llama4_text": t.Llama4TextConfig(
            **wide | experts | {"num_experts_per_tok": 1},
            intermediate_size_mlp=20,
            num_local_experts=4,
            interleave_moe_layer_step=3,
            no_rope_layer_interval=2,
            attention_chunk_size=5,
            attn_scale=0.5,
            floor_scale=4,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 16,
            },
        ),
        "granitemoehybrid": t.GraniteMoeHybridConfig(
            **sizes | experts | {"num_key_value_heads": 2},
            shared_intermediate_size=20,
            num_local_experts=4,
            layer_types=["mamba", "attention", "mamba"] * (layers // 3),
            mamba_n_heads=4,
            mamba_d_head=8,
            mamba_n_groups=2,
            mamba_d_state=6,
            mamba_chunk_size=4,
            embedding_multiplier=3.0,
            logits_scaling=6.0,
            residual_multiplier=0.4,
            attention_multiplier=0.3,
            position_embedding_type="nope",  # as released files have it; null is the same
        ),
        "nemotron_h": t.NemotronHConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            layers_block_type=["linear_attention", "moe", "full_attention", "moe", "linear_attention", "moe"][:layers],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            ssm_state_size=6,
            mamba_num_heads=4,
            mamba_head_dim=8,
            n_groups=2,
            chunk_size=4,
            time_step_min=0.3 if layers == 3 else 0.001,  # which transformers has not where it decodes token by token
            n_routed_experts=4,
            moe_intermediate_size=8,
            moe_shared_expert_intermediate_size=12,
            routed_scaling_factor=1.5,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
        ),
        "mamba2": t.Mamba2Config(
            hidden_size=16,
            num_hidden_layers=layers,
            vocab_size=VOCABULARY,
            num_heads=4,
            head_dim=8,
            n_groups=2,
            state_size=6,
            chunk_size=4,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
            initializer_range=0.02,
        ),
        "gpt_oss": t.GptOssConfig(
            **wide | experts,
            num_local_experts=4,
            sliding_window=5,
            swiglu_limit=0.7,
            rope_parameters=YARN | {"truncate": False},
        ),
    }


def random_model(config):
    """A model whose parameters are all random; norms of Gemma and Qwen3-Next multiply by 1 + theirs.

    With recurrent mixers of the same size, torch's own gradients in fp32 and in fp64 would differ by 2e-4.
    """
    import torch

    model = make_golden.random_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            offset = config.model_type.startswith(("gemma", "qwen3_next")) and "linear_attn" not in name
            if "norm" in name and offset:
                parameter.sub_(1)
            if config.model_type in RECURRENT:
                parameter.mul_(4 if "embed" in name else 0.3 if "out_proj" in name else 1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


def write_tokenizer(directory: pathlib.Path) -> None:
    """The golden models' tokenizer, in whatever family."""
    make_golden.write_tokenizer(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


FAMILIES = (
    *(
        "gemma",
        "gemma2",
        "gemma3_text",
        "olmo2",
        "olmo3",
        "phi3",
        "smollm3",
        "glm4",
        "granite",
        "cohere2",
        "starcoder2",
    ),
    *("ministral", "ministral3", "exaone4", "seed_oss", "nanochat", "glm4_moe", "dots1", "qwen2_moe", "gpt_oss"),
    *("deepseek_v2", "deepseek_v3", "mamba2", "qwen3_next", "llama4_text", "granitemoehybrid", "nemotron_h"),
)
