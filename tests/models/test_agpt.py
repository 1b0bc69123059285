import torch
import torch.nn.functional as F

from spurline.models.agpt.configs import AGPTConfig
from spurline.models.common.init import initialize

CONFIG = AGPTConfig(vocab_size=50, dim=32, num_layers=2, dense_hidden_dim=40, num_heads=4, num_kv_heads=1, head_dim=8)


def built():
    model = CONFIG.build()
    initialize(model, 0)
    return model


def test_state_dict_has_readable_names_and_no_norms_of_queries_and_keys():
    names = built().state_dict().keys()
    assert {name.removeprefix("layers.0.") for name in names if not name.startswith("layers.1.")} == {
        "embedding.weight",
        "norm.weight",
        "output.weight",
        "attention_norm.weight",
        "attention.wq.weight",
        "attention.wk.weight",
        "attention.wv.weight",
        "attention.wo.weight",
        "ffn_norm.weight",
        "feed_forward.w1.weight",
        "feed_forward.w3.weight",
        "feed_forward.w2.weight",
    }


def test_config_counts_the_parameters_of_the_model():
    assert CONFIG.problems() == []
    assert sum(parameter.numel() for parameter in built().parameters()) == CONFIG.num_params()
    assert CONFIG.num_active_params() == CONFIG.num_params()


def test_flops_are_six_a_matrix_weight_and_what_attention_multiplies():
    norms = 5 * 32
    matrices = CONFIG.num_params() - 50 * 32 - norms
    keys_and_values = 3 * 2 * 4 * (8 + 8) * 100
    assert CONFIG.flops_per_token(100) == 6 * (matrices + norms) + keys_and_values


def test_a_token_changes_no_logits_before_it():
    model, tokens_BL = built(), torch.arange(18).view(2, 9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1)
    changed_BL = tokens_BL.clone()
    changed_BL[:, 5] += 1
    before, after = model(tokens_BL), model(changed_BL)
    torch.testing.assert_close(after[:, :5], before[:, :5], rtol=0, atol=1e-5)
    assert ((after - before)[:, 5:].abs().amax((0, 2)) > 1e-2).all()


def test_every_parameter_learns():
    model = built()
    F.cross_entropy(model(torch.arange(32).view(2, 16)).flatten(0, 1), torch.arange(32) + 9).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name
