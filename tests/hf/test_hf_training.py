"""Families with the weights of tiny models of `transformers`: loss, every gradient, and generation with a cache.

B sequences of L tokens.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from their_models import MODELS, VOCABULARY, make, save
from torch import Tensor, nn

from spurline.hf.accounting import account
from spurline.hf.families import find_architecture, read_model_config
from spurline.hf.folder import find_tensors, read_json
from spurline.hf.quantized import dequantized
from spurline.hf.slots import read_slot
from spurline.models.common.cache import KVCache
from spurline.testing.equivalence import relative_error


def read_ours(folder: Path) -> tuple[nn.Module, dict[str, Tensor]]:
    """Our model for a folder of theirs, not yet filled, and its tensors."""
    their_config = read_json(folder / "config.json")
    architecture = find_architecture(their_config, "config.json")
    config = read_model_config(architecture, their_config, "config.json")
    stored = dequantized(find_tensors(folder), their_config, "folder")
    slots, _ = account(architecture, config, their_config, stored, "folder")
    return config.build(), {slot.name: read_slot(slot, stored, torch.float32) for slot in slots}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_of_a_step_and_generation_with_a_cache(name: str, tmp_path: Path) -> None:
    theirs = make(name)
    ours, weights = read_ours(save(theirs, tmp_path / "weights"))
    ours.load_state_dict(weights)
    tokens_BL, labels_BL = torch.randint(VOCABULARY, (2, 3, 29), generator=torch.Generator().manual_seed(1))
    expected_BLV, logits_BLV = theirs(tokens_BL).logits, ours(tokens_BL)
    assert expected_BLV.std() > 0.5
    assert (logits_BLV - expected_BLV).abs().max() < 1e-4
    expected_loss, loss = (
        F.cross_entropy(logits.flatten(0, 1), labels_BL.flatten()) for logits in (expected_BLV, logits_BLV)
    )
    assert abs(loss.item() - expected_loss.item()) < 1e-5
    loss.backward()
    expected_loss.backward()

    # Their gradients, saved as if they were weights: so they have the names and shapes of files.
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    _, expected = read_ours(save(theirs, tmp_path / "gradients"))
    errors = {key: relative_error(p.grad, expected[key]) for key, p in ours.named_parameters()}
    assert max(errors.values()) < 1e-4, max(errors, key=errors.__getitem__)

    with torch.no_grad():
        cache = KVCache(ours.config.num_layers, 29)
        steps = [ours(tokens_BL[:, :9], cache), *(ours(tokens_BL[:, i : i + 1], cache) for i in range(9, 29))]
    assert (torch.cat(steps, 1) - logits_BLV[:, 8:]).abs().max() < 1e-4
