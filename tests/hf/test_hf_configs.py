"""config.json to our model configs and back: published files give our presets, and nothing is overlooked."""

from dataclasses import replace

import pytest
import transformers
from their_models import MODELS, SHARED

from spurline.hf.families import architecture_for, find_architecture, read_model_config, run_config_like_a_preset
from spurline.models import family_configs, family_names
from spurline.moe.config import MoEConfig

_QWEN3 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_DEEPSEEK = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"},
    "ep_size": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}


def qwen3(dim, num_layers, num_heads, hidden, tied):
    return _QWEN3 | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": dim,
        "num_hidden_layers": num_layers,
        "max_window_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 8,
        "intermediate_size": hidden,
        "tie_word_embeddings": tied,
    }


def qwen3_moe(dim, num_layers, num_heads, hidden, expert_hidden):
    return qwen3(dim, num_layers, num_heads, hidden, tied=False) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": expert_hidden,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def yarn(mscale):
    shared = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
    return {"rope_scaling": shared | {"mscale": mscale, "mscale_all_dim": mscale}}


V2_LITE = {
    **_DEEPSEEK,
    **yarn(0.707),
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
V3 = {
    **_DEEPSEEK,
    **yarn(1.0),
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "vocab_size": 129280,
}
KIMI_K2 = {
    **V3,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": yarn(1.0)["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "seq_aux": True,
    "topk_group": 1,
    "vocab_size": 163840,
}
_SHARED = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "output_router_logits": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
MIXTRAL = {
    **_SHARED,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "vocab_size": 32000,
}
OLMOE = {
    **_SHARED,
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "attention_bias": False,
    "clip_qkv": None,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "vocab_size": 50304,
}
QWEN1_5_MOE = {
    **_SHARED,
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPT_OSS_20B = {
    **_SHARED,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
}
GLM4_5_AIR = {
    **_SHARED,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
PUBLISHED = {
    "glm4_5_air": GLM4_5_AIR,
    "gpt_oss_20b": GPT_OSS_20B,
    "kimi_k2": KIMI_K2,
    "mixtral_8x7b": MIXTRAL,
    "olmoe_7b_a1b": OLMOE,
    "qwen1_5_moe_a2_7b": QWEN1_5_MOE,
    "deepseek_v3_16b": V2_LITE,
    "deepseek_v3_671b": V3,
    "qwen3_0_6b": qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3_1_7b": qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3_4b": qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3_8b": qwen3(4096, 36, 32, 12288, tied=False),
    "qwen3_14b": qwen3(5120, 40, 40, 17408, tied=False),
    "qwen3_32b": qwen3(5120, 64, 64, 25600, tied=False),
    "qwen3_30b_a3b": qwen3_moe(2048, 48, 32, 6144, expert_hidden=768),
    "qwen3_235b_a22b": qwen3_moe(4096, 94, 64, 12288, expert_hidden=1536),
}
PRESETS = {name: (family, preset()) for family in family_names() for name, preset in family_configs(family).items()}


def read(theirs):
    return read_model_config(find_architecture(theirs, "config.json"), theirs, "config.json")


def without_training(model):
    """The fields that change the logits: not how the balance between experts is kept, nor a width nobody uses."""
    if not hasattr(model, "moe"):
        return model
    moe = replace(model.moe, bias_update_rate=0.0, aux_loss="none", aux_loss_weight=0.0, z_loss_weight=0.0)
    dense_hidden_dim = model.dense_hidden_dim if model.num_dense_layers else 0
    return replace(model, moe=moe, dense_hidden_dim=dense_hidden_dim)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_our_preset(name):
    family, preset = PRESETS[name]
    model = read(PUBLISHED[name])
    assert without_training(model) == without_training(preset.model)
    architecture = find_architecture(PUBLISHED[name], "config.json")
    found = run_config_like_a_preset(architecture, model, "out", 40960)
    assert found[:2] == (family, name)
    assert without_training(found[2].model) == without_training(preset.model)
    assert replace(found[2], model=None, job=None, checkpoint=None) == replace(
        preset, model=None, job=None, checkpoint=None
    )
    assert found[2].checkpoint.enable


@pytest.mark.parametrize("name", MODELS)
def test_a_config_of_ours_reads_as_itself(name):
    kind, own = MODELS[name]
    theirs = getattr(transformers, f"{kind}Config")(**{**SHARED, **own}).to_dict()
    theirs["architectures"] = [f"{kind}ForCausalLM"]
    model = read(theirs)
    family = run_config_like_a_preset(find_architecture(theirs, "config.json"), model, "out", None)[0]
    architecture = architecture_for(family, model)
    assert architecture.name == f"{kind}ForCausalLM"
    assert read({"architectures": [architecture.name], **architecture.write(model)}) == model


SUPPORTED = {
    "llama": {"architectures": ["LlamaForCausalLM"], **PUBLISHED["qwen3_8b"], "rms_norm_eps": 1e-5},
    "qwen3": PUBLISHED["qwen3_8b"],
    "qwen3_moe": PUBLISHED["qwen3_30b_a3b"],
    "olmoe": OLMOE,
    "qwen2_moe": QWEN1_5_MOE,
    "gpt_oss": GPT_OSS_20B,
    "glm4_moe": GLM4_5_AIR,
    "v2": V2_LITE,
    "v3": V3,
}
for _key in ("use_sliding_window", "sliding_window", "max_window_layers"):
    del SUPPORTED["llama"][_key]
SUPPORTED["llama"]["architectures"] = ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, 'hidden_act is "gelu", and Spurline has only "silu"'),
        ("llama", {"attention_bias": True}, "attention_bias is true"),
        ("llama", {"mlp_bias": True}, "mlp_bias is true"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor is missing"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, 'rope_scaling.rope_type is "longrope"'),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 8.0}}, 'rope_scaling.type is "linear"'),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1]}}, "rope_parameters.mrope_section is"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, 'quantization_config.quant_method is "gptq"'),
        ("llama", {"logit_softcapping": 30.0}, "logit_softcapping is 30.0, which Spurline does not know"),
        ("llama", {"vocab_size": "many"}, 'vocab_size is "many", which is not of type int'),
        ("llama", {"vocab_size": None}, "vocab_size is missing"),
        ("llama", {"num_key_value_heads": 5}, "num_kv_heads 5 does not divide num_heads 32"),
        ("llama", yarn(0.7), "rope_scaling.mscale_all_dim is 0.7"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window is true"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 5000}, "only multiples of moe_intermediate_size 1408"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 24}, "in turn"),
        ("glm4_moe", {"rope_scaling": {"rope_type": "linear"}}, 'rope_scaling.rope_type is "linear"'),
        ("v2", {"topk_method": "group_limited_greedy"}, 'topk_method is "group_limited_greedy"'),
        ("v2", {"scoring_func": "sigmoid"}, 'scoring_func is "sigmoid"'),
        ("v2", {"norm_topk_prob": True}, "norm_topk_prob is true"),
        ("v2", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
        ("v3", {"scoring_func": "softmax"}, 'scoring_func is "softmax"'),
        ("v3", {"topk_method": "greedy"}, 'topk_method is "greedy"'),
        ("v3", {"rope_interleave": False}, "rope_interleave is false"),
        ("v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("v3", {"n_shared_experts": None}, "n_shared_experts is 0"),
        ("v3", {"n_group": 7}, "num_groups 7 does not divide num_experts 256"),
        ("v3", {"num_key_value_heads": 4}, "num_key_value_heads is 4"),
    ],
)
def test_what_we_lack_is_refused_by_name(name, changes, message):
    read(SUPPORTED[name])
    with pytest.raises(ValueError, match=message):
        read(SUPPORTED[name] | changes)


def test_yarn_reads_as_transformers_does():
    shared = {"rope_type": "yarn", "factor": 4.0}
    model = read(SUPPORTED["llama"] | {"rope_scaling": shared | {"mscale": 0.5}, "max_position_embeddings": 4000})
    assert (model.yarn.factor, model.yarn.original_seq_len, model.yarn.mscale, model.yarn.mscale_all_dim) == (
        4,
        4000,
        1,
        0,
    )
    with pytest.raises(ValueError, match=r"rope_scaling\.attention_factor is 1\.5"):
        read(SUPPORTED["llama"] | {"rope_scaling": shared | {"attention_factor": 1.5}})
    with pytest.raises(ValueError, match="mscale is missing"):
        read(V3 | {"rope_scaling": shared | {"mscale_all_dim": 0.5}})


@pytest.mark.parametrize(
    ("preset", "changes", "moe", "message"),
    [
        ("moe_10b_2b", {}, {"route_norm": True}, "moe.route_norm is True, and DeepseekV2ForCausalLM can only be False"),
        ("moe_10b_2b", {}, {"num_groups": 4, "num_limited_groups": 2}, "moe.num_groups is 4"),
        ("moe_10b_2b", {}, {"num_shared_experts": 0}, "moe.num_shared_experts is 0"),
        ("moe_10b_2b", {"norm_eps": 1e-5}, {}, "norm_eps is 1e-05"),
        ("moe_10b_2b", {"num_heads": 15}, {}, "is not a multiple of model.num_heads 15"),
        ("deepseek_v3_236b", {}, {}, "moe.num_groups is 8"),
        ("deepseek_v3_671b", {}, {"score_before_experts": True}, "moe.score_before_experts is True"),
        ("deepseek_v3_671b", {}, {"force_load_balance": True}, "moe.force_load_balance is True"),
        ("qwen3_30b_a3b", {}, {"score_func": "sigmoid"}, "moe.score_func is 'sigmoid'"),
        ("qwen3_30b_a3b", {}, {"num_shared_experts": 1}, "moe.num_shared_experts is 1"),
        ("qwen3_30b_a3b", {}, {"route_scale": 2.0}, "moe.route_scale is 2.0"),
        ("agpt_2b", {"num_heads": 12, "num_kv_heads": 4}, None, "is not a multiple of model.num_heads 12"),
    ],
)
def test_what_their_architecture_lacks_is_refused_by_name(preset, changes, moe, message):
    family, run = PRESETS[preset]
    experts = {"moe": replace(run.model.moe, **moe)} if moe is not None else {}
    with pytest.raises(ValueError, match=message):
        architecture_for(family, replace(run.model, **changes, **experts))


def test_yarn_that_their_architecture_lacks_is_refused():
    for preset, mscale, all_dim in (("qwen3_8b", 0.7, 0.7), ("agpt_2b", 0.7, 0.0), ("deepseek_v3_671b", 0.7, 0.0)):
        family, run = PRESETS[preset]
        stretched = replace(run.model.yarn, factor=4.0, mscale=mscale, mscale_all_dim=all_dim)
        with pytest.raises(ValueError, match=r"model\.yarn\.mscale is 0\.7"):
            architecture_for(family, replace(run.model, yarn=stretched))


def test_every_other_preset_has_an_architecture():
    for name, (family, run) in PRESETS.items():
        if family != "qwen3_vl" and name != "deepseek_v3_236b":
            architecture_for(family, run.model)


def test_experts_without_a_selection_bias_are_kept_busy_by_a_loss():
    theirs = V2_LITE | {"n_routed_experts": 36, "num_experts_per_tok": 3, "rope_scaling": None}
    architecture = find_architecture(theirs, "config.json")
    family, name, run = run_config_like_a_preset(architecture, read(theirs), "out", 100)
    assert (family, name, run.training.seq_len) == ("moe_10b_2b", "moe_10b_2b", 100)
    assert run.model.moe == MoEConfig(
        hidden_dim=1408, num_experts=36, top_k=3, num_shared_experts=2, bias_update_rate=0.0, aux_loss="sequence"
    )
