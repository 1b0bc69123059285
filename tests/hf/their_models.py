"""Tiny random models, made by `transformers` itself and saved as it saves them."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCABULARY = 300  # with room for the byte tokenizer
SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
LLAMA3 = {  # of the four pairs of channels, the second lies between low and high frequencies
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 4.0}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
}
GROUPS = {"n_group": 4, "topk_group": 2}
SQUARE = {"moe_intermediate_size": 32, "intermediate_size": 32}  # as wide as the model: a transposed weight fits too
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}

# What is special about each, by a name for it: the class, and changes to its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rms_norm_eps": 1e-5}),
    "llama-tied-square": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "intermediate_size": 32}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-3.1": ("Llama", {"rope_parameters": LLAMA3}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3-tied": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 12, **EXPERTS}),
    "qwen3_moe-square-dense-first": (
        "Qwen3Moe",
        {**EXPERTS, **SQUARE, "norm_topk_prob": False, "mlp_only_layers": [0]},
    ),
    "qwen3_moe-every-second-dense": ("Qwen3Moe", {**EXPERTS, "decoder_sparse_step": 2}),
    "qwen3_moe-dense-anywhere": (
        "Qwen3Moe",
        {**EXPERTS, "num_hidden_layers": 5, "mlp_only_layers": [0, 2, 3], "tie_word_embeddings": True},
    ),
    "deepseek_v3": ("DeepseekV3", {**LATENT, **GROUPS, "q_lora_rank": 16}),
    "deepseek_v3-square": ("DeepseekV3", {**LATENT, **SQUARE, "n_group": 1, "topk_group": 1, "q_lora_rank": None}),
    "deepseek_v3-yarn": (
        "DeepseekV3",
        {**LATENT, **GROUPS, "q_lora_rank": 16, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}},
    ),
    "deepseek_v2": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "routed_scaling_factor": 1.5}),
    "deepseek_v2-yarn": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": 16, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
}


GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 12, "sliding_window": 7}
GLM4 = {
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}
MODELS |= {
    "mistral": ("Mistral", {"head_dim": 12, "sliding_window": 7}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 3, "tie_word_embeddings": True}),
    "mixtral-square-window": (
        "Mixtral",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "head_dim": 12,
            "sliding_window": 7,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24}),
    "olmoe-square-tied": (
        "Olmoe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "num_key_value_heads": 4,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": ("Qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
    "qwen2_moe-square-tied-no-bias": (
        "Qwen2Moe",
        {**EXPERTS, **SQUARE, "shared_expert_intermediate_size": 32, "qkv_bias": False, "tie_word_embeddings": True},
    ),
    "gpt_oss": ("GptOss", {**GPT_OSS, "intermediate_size": 24}),
    "gpt_oss-square-yarn": (
        "GptOss",
        {
            **GPT_OSS,
            "intermediate_size": 32,
            "rope_parameters": {**YARN, "truncate": False},
            "tie_word_embeddings": True,
        },
    ),
    "glm4_moe": ("Glm4Moe", {**GLM4, "attention_bias": True, "use_qk_norm": False, "n_group": 1, "topk_group": 1}),
    "glm4_moe-square-tied": (
        "Glm4Moe",
        {**GLM4, **SQUARE, **GROUPS, "use_qk_norm": True, "n_shared_experts": 2, "tie_word_embeddings": True},
    ),
}


def make(name: str, **changes: Any) -> nn.Module:
    """A model in which no norm is all ones, no bias zero and no attention all but uniform."""
    kind, own = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SHARED, **own, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor_name.endswith("norm.weight"):
                tensor.copy_(1 + 0.3 * noise)
            elif tensor_name.endswith("e_score_correction_bias"):
                tensor.copy_(0.2 * noise)
            elif "inv_freq" not in tensor_name:
                # Those of gpt-oss are large enough for its activation to be clamped.
                factor = 6 if kind == "GptOss" and tensor_name.endswith("gate_up_proj") else 1
                tensor.copy_(factor * noise * tensor.shape[-1] ** -0.5)
    return model


def save(model: nn.Module, folder: Path, **settings: Any) -> Path:
    model.save_pretrained(folder, **settings)
    return folder


def load(folder: Path) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    tokens_BL = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    output = model(tokens_BL)
    return output if isinstance(output, Tensor) else output.logits
